"""A server's answer to `GET /v1/models`: OpenAI's list of models, as vLLM and others write it.

Strict about fields that routing uses (`id`, `parent`), and lenient about all others: a field of the wrong
type is left out. A list that is too long or empty is refused, so the list of this server counts as unknown.
Pure; called by `model_lists`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from epp.request.names import MAX_NAME_CHARS
from epp.types import ModelCard, ModelList

MOST_CARDS: Final = 512
"""Most models and adapters of one server."""
_Owner = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Number = Annotated[int, Meta(ge=0, le=2**53)]


class ModelPageError(Exception):
    """The answer is not a list of models."""


class _Card(Struct, gc=False):
    id: str
    parent: str | None = None
    root: Raw = Raw(b"null")
    created: Raw = Raw(b"null")
    owned_by: Raw = Raw(b"null")
    max_model_len: Raw = Raw(b"null")


class _Page(Struct, gc=False):
    data: list[_Card]


_DECODE: Final = msgspec.json.Decoder(_Page)


def parse_model_page(page: bytes) -> ModelList:
    """Raises ModelPageError for anything but a list of models."""
    try:
        cards = _DECODE.decode(page).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelPageError(f"the answer is not a list of models: {str(error)[:200]}") from error
    if not 0 < len(cards) <= MOST_CARDS:
        raise ModelPageError(f"the list has {len(cards)} models; only lists of 1 to {MOST_CARDS} are read")
    if not all(
        0 < len(name) <= MAX_NAME_CHARS for card in cards for name in (card.id, card.parent or card.id)
    ):
        raise ModelPageError(f"the name of a model is empty or has more than {MAX_NAME_CHARS} characters")
    return ModelList(tuple(_card(card) for card in cards))


def _card(card: _Card) -> ModelCard:
    return ModelCard(
        id=card.id,
        created=_value(card.created, _Number) or 0,
        owned_by=_value(card.owned_by, _Owner) or "",
        root=_value(card.root, _Name),
        parent=card.parent or None,
        max_model_len=_value(card.max_model_len, _Number),
    )


def _value(raw: Raw, kind: Any) -> Any:
    """None: it is of another type, or too long or large."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
