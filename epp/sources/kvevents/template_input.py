"""Reads the conversation that the server's chat template gets, from the canonical prompt.

`epp.request.canonical` wrote the prompt. It contains everything that a template reads of the messages, except
media, which are named by a hash, and earlier thoughts, which templates leave out too. Prompts with media are
refused here. Each text keeps its position in the prompt, from which `mapping` finds positions in the rendered
text.

Pure. Callers: `mapping`, `language`, tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epp.request.canonical import BODY, FIELD, OPAQUE, PART, SECTION
from epp.request.jsontext import decode

_TOOLS: Final = FIELD + b"tools"
_CALL_FIELDS: Final = {b"tool_calls": "tool_calls", b"function_call": "function_call"}


class UnmappedError(Exception):
    """The blocks of a prompt cannot be named. `reason` is a label of a metric."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text and its place in the prompt, in bytes."""

    start: int
    text: str
    end: int


@dataclass(frozen=True, slots=True)
class TemplateInput:
    messages: Sequence[dict[str, Any]]
    """The messages as an OpenAI client sends them. A content of several parts is a list of strings."""
    tools: Sequence[Any] | None = None
    texts: Sequence[Text] = field(default=())


def read_conversation(prompt: bytes) -> TemplateInput:
    """Return the conversation of a chat's canonical prompt. Raises UnmappedError."""
    if OPAQUE in prompt:
        raise UnmappedError("media or a stored conversation", reason="content")
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
        raise UnmappedError(
            f"tools or a tool call that cannot be read ({error})", reason="content"
        ) from error
    return TemplateInput(messages, tools, texts)


def _message(heading: bytes, body: bytes, *, start: int, texts: list[Text]) -> dict[str, Any]:
    role, *fields = heading.split(FIELD)
    if not role:
        raise UnmappedError("a section that is no message", reason="content")
    message: dict[str, Any] = {"role": role.decode()}
    for one in fields:
        key, _, value = one.partition(b"=")
        message["name" if key == b"name" else "tool_call_id"] = value.decode()
    contents: list[str] = []
    for part in body.split(PART):
        end = start + len(part)
        if not part.startswith(FIELD):
            contents.append(part.decode())
            texts.append(Text(start, contents[-1], end))
        else:
            label, _, value = part[len(FIELD) :].partition(FIELD)
            if label == b"reasoning":
                message["reasoning"] = message["reasoning_content"] = value.decode()
            elif label in _CALL_FIELDS:
                message[_CALL_FIELDS[label]] = decode(value)
            else:
                raise UnmappedError("a content part that is no text", reason="content")
        start = end + len(PART)
    message["content"] = contents[0] if len(contents) == 1 else contents
    return message
