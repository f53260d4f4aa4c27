"""The prompts in request bodies: a text, token ids, a batch of either, or messages. Called by `parse`."""

from __future__ import annotations

from typing import Final

from msgspec import MsgspecError, Raw, Struct

from epp.base.errors import BadRequestError
from epp.request import canonical
from epp.request.api_fields import ChatMessage
from epp.request.canonical import (
    NO_RAW,
    Piece,
    bad_field,
    content_bytes,
    first_item,
    items_of,
    optional_text,
)
from epp.request.jsontext import first_byte, plain_text, text_bytes, token_bytes

_QUOTE, _LIST = ord('"'), ord("[")
_NUMBERS: Final = b"-0123456789"
_EXPECTED: Final = "must be a string, a list of strings, or token ids"
_ONE_TYPE: Final = "must hold prompts of one type: all strings, all token ids, or all lists of token ids"


class Prompts(Struct, frozen=True, gc=False):
    first: bytes
    """The prompt that is matched against the servers' caches."""
    more_bytes: int = 0
    """Size of all other prompts."""
    token_ids: bool = False


def read_prompts(raw: Raw, *, where: str) -> Prompts | None:
    """Return the prompts of a `prompt` or `input` field. None: an empty list. Raises BadRequestError, or
    the decoder's errors, if the value is none of these.
    """
    text = text_bytes(raw)
    if text is not None:
        return Prompts(text)
    items = first_item(raw) if first_byte(raw) == _LIST else 0
    if items and items in _NUMBERS:
        return Prompts(_tokens(raw, where=where), token_ids=True)
    prompts = items_of(raw, where=where, expected=_EXPECTED)
    if not prompts:
        return None
    kind = first_byte(prompts[0])
    if kind not in (_QUOTE, _LIST):
        raise bad_field(f"{where}[0]", _EXPECTED)
    if any(first_byte(prompt) != kind for prompt in prompts):
        raise bad_field(where, _ONE_TYPE)
    if kind == _QUOTE:
        sizes = [len(text_bytes(prompt) or b"") for prompt in prompts]
        return Prompts(text_bytes(prompts[0]) or b"", sum(sizes) - sizes[0])
    first = _tokens(prompts[0], where=f"{where}[0]")
    more = sum(len(_tokens(prompt, where=f"{where}[{n}]")) for n, prompt in enumerate(prompts[1:], 1))
    return Prompts(first, more, token_ids=True)


def _tokens(raw: Raw, *, where: str) -> bytes:
    if bytes(raw) == b"[]":
        return b""
    try:
        return token_bytes(raw)
    except OverflowError:
        raise bad_field(where, "holds a token id out of range (0 to 4294967295)") from None
    except MsgspecError:
        raise bad_field(where, "must hold prompts of one type: all strings, or all token ids") from None


def render_messages(sections: list[Piece], messages: list[ChatMessage] | None) -> None:
    """Append the messages, as parts of a canonical prompt, to `sections`."""
    if not messages:
        what = "send a list with at least one message"
        raise BadRequestError(f"`messages` is missing or empty: {what}.", reason="no_messages")
    for position, message in enumerate(messages):
        sections.append(_heading(message, position=position))
        if message.content is not NO_RAW:
            text = plain_text(message.content)  # nearly every content is a plain string
            if text is None:
                text = content_bytes(message.content, where=f"messages[{position}].content")
            sections.append(text)
        if message.tool_calls is not NO_RAW:
            sections += canonical.raw_call(b"tool_calls", message.tool_calls)
        if message.function_call is not NO_RAW:
            sections += canonical.raw_call(b"function_call", message.function_call)


def _heading(message: ChatMessage, *, position: int) -> bytes:
    role = text_bytes(message.role)
    if role is None:
        raise bad_field(f"messages[{position}].role", "must be a string")
    if message.name is NO_RAW and message.tool_call_id is NO_RAW:
        return canonical.heading(role)
    name = optional_text(message.name, where=f"messages[{position}].name")
    answers = optional_text(message.tool_call_id, where=f"messages[{position}].tool_call_id")
    return canonical.heading(role, name=name, answers=answers)
