"""The prompts in request bodies: a text, token ids, a batch of either, messages, or items of the responses
API. Called by `parse`.

Chat templates leave out what the assistant thought before the last message of the user. So thoughts count
only since then, and the answer to the next message makes the chain end where the earlier thoughts began, as
it does in the server's cache.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from epp.request import canonical
from epp.request.api_fields import ChatMessage
from epp.request.canonical import (
    FIELD,
    NO_RAW,
    PART,
    TOOL_RESULT,
    Piece,
    UnfollowedError,
    content_parts,
    first_item,
    items_of,
    text_or_json,
)
from epp.request.jsontext import first_byte, plain_text, text_bytes, token_bytes

_QUOTE, _LIST = ord('"'), ord("[")
_NUMBERS: Final = b"-0123456789"


class Prompts(Struct, frozen=True, gc=False):
    first: bytes = b""
    """The prompt that is matched against the servers' caches."""
    more_bytes: int = 0
    """Size of all other prompts."""
    token_ids: bool = False


def read_prompts(raw: Raw) -> Prompts:
    """Return the prompts of a field with a string, a list of strings, or token ids. Raises UnfollowedError,
    OverflowError or the decoder's errors, if the value is none of these.
    """
    text = text_bytes(raw)
    if text is not None:
        return Prompts(text)
    if not canonical.present(raw):
        return Prompts()
    items = first_item(raw) if first_byte(raw) == _LIST else 0
    if items and items in _NUMBERS:
        return Prompts(_tokens(raw), token_ids=True)
    prompts = items_of(raw)
    kind = first_byte(prompts[0])
    if kind not in (_QUOTE, _LIST) or any(first_byte(prompt) != kind for prompt in prompts):
        raise UnfollowedError
    if kind == _QUOTE:
        sizes = [len(text_bytes(prompt) or b"") for prompt in prompts]
        return Prompts(text_bytes(prompts[0]) or b"", sum(sizes) - sizes[0])
    first, *more = (_tokens(prompt) for prompt in prompts)
    return Prompts(first, sum(map(len, more)), token_ids=True)


def _tokens(raw: Raw) -> bytes:
    return b"" if bytes(raw) == b"[]" else token_bytes(raw)


def render_messages(sections: list[Piece], messages: list[ChatMessage] | None, *, thinks: bool) -> None:
    """Append the messages, as parts of a canonical prompt, to `sections`. thinks: the API's thinking parts
    are thoughts of the assistant, and not texts of the content.
    """
    open_thoughts: list[int] = []
    for message in messages or ():
        role = text_bytes(message.role)
        if role is None:
            raise UnfollowedError
        thoughts: list[bytes] = []
        text = plain_text(message.content) if role != b"system" else None
        if text is None:
            parts = content_parts(
                message.content, thoughts=thoughts if thinks else None, system=role == b"system"
            )
            text = PART.join(parts)
        if role == b"user" and open_thoughts and not _only_results(text, message.content):
            _forget(sections, open_thoughts)
        sections.append(_heading(message, role))
        if role == b"assistant":
            thoughts.append(text_bytes(message.reasoning) or text_bytes(message.reasoning_content) or b"")
            if any(thoughts):
                open_thoughts.append(len(sections))
                sections.append(FIELD + b"reasoning" + FIELD + b"".join(thoughts) + PART)
        sections.append(text)
        if message.tool_calls is not NO_RAW:
            sections += canonical.raw_call(b"tool_calls", message.tool_calls)
        if message.function_call is not NO_RAW:
            sections += canonical.raw_call(b"function_call", message.function_call)


def _only_results(text: bytes, content: Raw) -> bool:
    """Return whether a user's message only holds results of tools, which servers render as messages of
    tools.
    """
    return text.startswith(TOOL_RESULT) and all(
        part.startswith(TOOL_RESULT) for part in content_parts(content)
    )


def _forget(sections: list[Piece], places: list[int]) -> None:
    for place in places:
        sections[place] = b""
    places.clear()


def _heading(message: ChatMessage, role: bytes) -> bytes:
    if message.name is NO_RAW and message.tool_call_id is NO_RAW:
        return canonical.heading(role)
    name, answers = text_bytes(message.name), text_bytes(message.tool_call_id)
    return canonical.heading(role, name=name or b"", answers=answers or b"")


class _Item(Struct, gc=False):
    """One item of the responses API's `input`."""

    type: Raw = NO_RAW
    role: Raw = NO_RAW
    content: Raw = NO_RAW
    summary: Raw = NO_RAW
    name: Raw = NO_RAW
    arguments: Raw = NO_RAW
    input: Raw = NO_RAW
    output: Raw = NO_RAW


_DECODE_ITEM = msgspec.json.Decoder(_Item)


def render_items(sections: list[Piece], raw: Raw) -> None:
    """Append the items of the responses API: messages, thoughts, tool calls, outputs of tools. Of any other
    item only a hash counts.
    """
    open_thoughts: list[int] = []
    for each in items_of(raw) if canonical.present(raw) else ():
        item = _DECODE_ITEM.decode(each)
        kind, role = text_bytes(item.type) or b"message", text_bytes(item.role)
        if kind == b"reasoning":
            parts = content_parts(item.content) or content_parts(item.summary)
            open_thoughts.append(len(sections))
            sections.append(canonical.label(kind) + b"".join(parts) if parts else b"")
        elif kind == b"message" and role is not None:
            if role == b"user":
                _forget(sections, open_thoughts)
            parts = content_parts(item.content, system=role == b"system")
            sections += (canonical.heading(role), PART.join(parts))
        else:
            known = [
                text_or_json(part) for part in (item.name, item.arguments, item.input) if part is not NO_RAW
            ]
            if first_byte(item.output) in b'"[':
                known.append(PART.join(content_parts(item.output)))
            sections += (
                canonical.label(kind),
                FIELD.join(known) if known else canonical.fingerprint(each),
            )
