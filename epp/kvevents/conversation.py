"""Reads the canonical prompt back into the input of a chat template, and remembers where in the prompt each
text came from.

`epp.request.canonical` wrote these bytes. They contain everything that a template reads, except media (which
are named by a hash) and thinking (which is left out). Prompts with these are refused here. Each text keeps
its position in the prompt, from which `alignment` finds positions in the rendered text.

Pure. Callers: `mapping`, tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epp.request.bounded_json import decode
from epp.request.canonical import BODY, FIELD, OPAQUE, PART, SECTION

_TOOLS: Final = FIELD + b"tools"
_CALL_FIELDS: Final = {b"tool_calls": "tool_calls", b"function_call": "function_call"}


class UnreadableError(Exception):
    """The prompt needs something for a chat template that the canonical form does not keep."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text and its place in the prompt, in bytes."""

    start: int
    text: str
    end: int


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Sequence[dict[str, Any]]
    """As an OpenAI client sends them. A content of several parts is a list of strings."""
    tools: Sequence[Any] | None = None
    texts: Sequence[Text] = field(default=())
    """Every text of the messages, in order."""


def read_conversation(prompt: bytes) -> Conversation:
    """The conversation of a chat's canonical prompt. Raises UnreadableError."""
    if OPAQUE in prompt:
        raise UnreadableError("media or a stored conversation")
    messages: list[dict[str, Any]] = []
    texts: list[Text] = []
    tools: Sequence[Any] | None = None
    at = 0
    try:
        for section in prompt.split(SECTION)[1:]:
            at += len(SECTION)
            heading, _, body = section.partition(BODY)
            if heading == _TOOLS:
                tools = decode(body)
            else:
                start = at + len(heading) + len(BODY)
                messages.append(_message(heading, body, start=start, texts=texts))
            at += len(section)
    except ValueError as error:
        raise UnreadableError(f"tools or a tool call that cannot be read ({error})") from error
    return Conversation(messages, tools, texts)


def _message(heading: bytes, body: bytes, *, start: int, texts: list[Text]) -> dict[str, Any]:
    role, *fields = heading.split(FIELD)
    if not role:
        raise UnreadableError("a section that is no message")
    message: dict[str, Any] = {"role": role.decode()}
    for one in fields:
        key, _, value = one.partition(b"=")
        message["name" if key == b"name" else "tool_call_id"] = value.decode()
    said: list[str] = []
    for part in body.split(PART):
        end = start + len(part)
        if not part.startswith(FIELD):
            said.append(part.decode())
            texts.append(Text(start, said[-1], end))
        else:
            label, _, value = part[len(FIELD) :].partition(FIELD)
            if label not in _CALL_FIELDS:
                raise UnreadableError("a content part that is no text")
            message[_CALL_FIELDS[label]] = decode(value)
        start = end + len(PART)
    message["content"] = said[0] if len(said) == 1 else said
    return message
