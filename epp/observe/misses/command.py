"""`epp explain`: asks a running picker why prompt tokens were not cached, and prints the answer."""

from __future__ import annotations

import http.client
import urllib.request
from typing import Any, Final

from epp.base.errors import ConfigError
from epp.request.jsontext import decode

_WITHIN_S: Final = 10.0
_MOST_BYTES: Final = 2**20
_SHOWN_SERVERS: Final = 4


def fetch(admin: str, *, window_s: int) -> dict[str, Any]:
    """Ask the picker. Raises ConfigError if nothing answers, or if the answer is not from a picker."""
    url = f"{admin.rstrip('/')}/explain?window={window_s}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--admin {admin}: must be an address such as http://127.0.0.1:9090")
    try:
        with urllib.request.urlopen(url, timeout=_WITHIN_S) as answer:  # noqa: S310 - http, checked above
            return parsed(answer.read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", error)
        raise ConfigError(f"--admin {admin}: {why}; name the admin.address of a running picker") from error


def parsed(answer: bytes) -> dict[str, Any]:
    """Decode the answer. Raises ValueError if it is not a picker's account."""
    found: dict[str, Any] = decode(answer)
    try:
        table(found)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"not an account of missed tokens: {error}") from error
    return found


def table(found: dict[str, Any]) -> str:
    """Return a table for people: the causes by size, and what to change."""
    lines = [
        f"{found['requests']:,} requests in the last {found['window_s']:,.0f} s, {found['prompt_tokens']:,} prompt tokens",
        f"{found['hit_ratio']:.1%} of these tokens were expected in the cache of the server that got them",
        "",
        f"{'share of missed':>15}  {'of all':>6}  {'tokens':>12}  why",
    ]
    policies = found.get("policies", ())
    if len(policies) > 1:
        lines[2:2] = [
            f"  {each['policy']}: {each['hit_ratio']:.1%} of {each['prompt_tokens']:,} tokens in {each['requests']:,} requests"
            for each in policies
        ]
    for cause in found["causes"]:
        if not cause["tokens"]:
            continue
        lines.append(
            f"{cause['share_of_missed']:>15.1%}  {cause['share_of_prompt']:>6.1%}  {cause['tokens']:>12,}  {cause['title']}"
        )
        indent = " " * 39
        lines += [f"{indent}{_server(s)}" for s in cause["servers"][:_SHOWN_SERVERS]]
        lines.append(f"{indent}-> {cause['advice']}")
    return "\n".join(lines)


def _server(server: dict[str, Any]) -> str:
    full = "" if server["full"] is None else f", its cache {server['full']:.0%} full"
    return f"{server['name']}: {server['tokens']:,} tokens{full}"
