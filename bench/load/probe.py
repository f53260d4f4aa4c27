"""Asks a gateway for its model and adapters before any load. If nothing answers, it says what to do."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Final

_WITHIN_S: Final = 10.0


class LoadError(Exception):
    """The load cannot start. The message says why and what to do next."""


@dataclass(frozen=True, slots=True)
class Served:
    model: str
    adapters: tuple[str, ...]


def probe(host: str, *, model: str) -> Served:
    """Ask the gateway for its model and adapters. `model` is the model to use, and an empty name means the
    first one that is served. Raise LoadError if no such model is served, or if nothing answers.
    """
    if not host.startswith(("http://", "https://")):
        raise LoadError(f"{host!r} is not the address of a gateway: write --host http://NAME:PORT")
    url = f"{host.rstrip('/')}/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=_WITHIN_S) as response:
            cards = json.loads(response.read())["data"]
        bases = [str(card["id"]) for card in cards if card.get("parent") is None]
        adapters = [
            (str(card["id"]), str(card["parent"])) for card in cards if card.get("parent") is not None
        ]
    except urllib.error.HTTPError as error:
        raise LoadError(
            f"{url} answers with status {error.code}. Is this the gateway, and is a model server ready behind it?"
        ) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise LoadError(
            f"Nothing answers at {host} ({reason}). Start a gateway there (`make run` starts one on its own ports), or name another gateway with --host http://NAME:PORT"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{url} does not return a list of models, so this is not an OpenAI API") from error
    if model and model not in (*bases, *(name for name, _ in adapters)):
        raise LoadError(
            f"{host} does not serve the model {model!r}. It serves {', '.join(bases) or 'no model'}"
        )
    if not bases:
        raise LoadError(f"{host} serves no model: is a model server ready behind it?")
    chosen = model or bases[0]
    return Served(chosen, tuple(name for name, parent in adapters if parent == chosen))
