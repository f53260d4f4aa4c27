"""Maps a routed prompt to the names of its blocks, and to the number of blocks that are complete at the end
of each chunk.

Chunks end at bytes of the canonical prompt, which `epp.request.canonical` wrote, and blocks end at tokens of
the rendered prompt. The canonical prompt contains everything that a chat template reads, except media, which
are named by a hash, and earlier thoughts, which templates leave out too. Prompts with media are refused here.

Each text of a conversation is searched in the output of the template, in order. Between two texts, and where
a template rewrites a text, positions are interpolated. An error of a few tokens there moves the end of a
chunk by at most one block.

Pure: the model's tokenizer and template are behind the `Language` protocol. Caller: `exact`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from epp.base.types import ApiKind, InferenceRequest
from epp.picker.prefix_index.table import ChunkSchedule
from epp.request.canonical import BODY, FIELD, OPAQUE, PART, SECTION
from epp.request.client_names import is_digest
from epp.request.jsontext import decode
from epp.sources.kvevents.block_hashes import BlockHasher
from epp.sources.kvevents.chunks import MappedPrompt
from epp.sources.kvevents.routed_prompts import RoutedPrompt

_TOKEN_ID_BYTES: Final = 4
_MOST_CHARS: Final = 2**20
"""Longest text that is tokenized. A `Language` bounds the tokens, too."""
_MOST_MISSED: Final = 256
"""Most texts that may not be found. Each costs a search through the whole prompt. After that, positions are
interpolated."""
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


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: Sequence[int]
    ends: Sequence[int]
    """Where each token ends in the text, in characters, in ascending order."""


class Language(Protocol):
    """One model's tokenizer and chat template."""

    def tokens(self, text: str, *, special: bool) -> Tokens:
        """special: include what the tokenizer itself puts around a text, as servers do with plain prompts.
        Raises UnmappedError, also for too many tokens.
        """
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None) -> str:
        """Return the conversation as the model reads it, ready for its answer. Raises UnmappedError."""
        ...


def map_prompt(
    routed: RoutedPrompt,
    *,
    language: Language | None,
    hasher: BlockHasher,
    block_tokens: int,
    adapter_path: str | None,
) -> MappedPrompt:
    """adapter_path: the path from which the servers loaded the adapter, if the prompt names one. Raises
    UnmappedError.
    """
    inference = routed.inference
    if routed.adapter and adapter_path is None:
        raise UnmappedError(f"no path is configured for adapter {routed.adapter}", reason="adapter")
    if is_digest(inference.cache_salt):
        raise UnmappedError("the cache salt is too long to be kept", reason="arguments")
    ids, rendered = _read(inference, language)
    adapter = (routed.adapter, adapter_path) if adapter_path is not None else None
    blocks = hasher.names(ids, block_tokens=block_tokens, adapter=adapter, cache_salt=inference.cache_salt)
    ends_bytes = chunk_ends(routed.schedule, len(routed.chain))
    if rendered is None:
        ends = whole_blocks(
            ends_bytes, bytes_per_token=_TOKEN_ID_BYTES, block_tokens=block_tokens, blocks=len(blocks)
        )
    else:
        ends = aligned_blocks(ends_bytes, rendered, block_tokens=block_tokens, blocks=len(blocks))
    return MappedPrompt(routed.chain, blocks, ends)


def _read(inference: InferenceRequest, language: Language | None) -> tuple[Sequence[int], Rendered | None]:
    """Return the prompt's token ids, and the text that they come from unless the prompt came as token ids.
    Raises UnmappedError.
    """
    if inference.shaped:
        raise UnmappedError("the request changes how its prompt is rendered", reason="arguments")
    if inference.token_ids:
        return array("I", inference.prompt).tolist(), None
    if language is None:
        raise UnmappedError("the model's tokenizer is not configured", reason="tokenizer")
    if inference.opaque_tokens or inference.kind not in (ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.MESSAGES):
        raise UnmappedError(f"media, embeddings, or the {inference.kind} API", reason="content")
    size = len(inference.prompt)
    if inference.kind is ApiKind.COMPLETIONS:
        text = _short(inference.prompt.decode())
        tokens = language.tokens(text, special=True)
        return tokens.ids, Rendered(text, tokens.ends, (Text(0, text, size),), size)
    chat = read_conversation(inference.prompt)
    text = _short(language.render(chat.messages, tools=chat.tools))
    tokens = language.tokens(text, special=False)
    return tokens.ids, Rendered(text, tokens.ends, chat.texts, size)


def _short(text: str) -> str:
    if len(text) > _MOST_CHARS:
        raise UnmappedError(f"a text of {len(text)} characters", reason="content")
    return text


# -- what the chat template gets ----------------------------------------------------------------------------


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


# -- where chunks end ---------------------------------------------------------------------------------------


def chunk_ends(schedule: ChunkSchedule, count: int) -> list[int]:
    """Return the bytes of the prompt that the first 1, 2, ... chunks cover."""
    return [schedule.end_bytes(k + 1) for k in range(count)]


def whole_blocks(
    ends_bytes: Sequence[int], *, bytes_per_token: int, block_tokens: int, blocks: int
) -> list[int]:
    """Return the number of blocks complete at the end of each chunk, for a prompt that came as token ids."""
    return [min(end // (bytes_per_token * block_tokens), blocks) for end in ends_bytes]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The server's version of a prompt of text."""

    text: str
    token_ends: Sequence[int]
    """Where each token ends in `text`, in characters, in ascending order."""
    texts: Sequence[Text]
    prompt_bytes: int


def aligned_blocks(
    ends_bytes: Sequence[int], rendered: Rendered, *, block_tokens: int, blocks: int
) -> list[int]:
    """Return the number of blocks complete at the end of each chunk, for a prompt of text."""
    anchors = _anchors(rendered.prompt_bytes, rendered.text, rendered.texts)
    found, at = [], 0
    for end in ends_bytes:
        while anchors[at + 1].text.end < end:
            at += 1
        chars = anchors[at + 1].place(end, after=anchors[at])
        found.append(min(bisect_right(rendered.token_ends, chars) // block_tokens, blocks))
    return found


class _Characters:
    """Counts the whole characters in the first bytes of a text, for growing numbers of bytes. Reads each byte
    once.
    """

    __slots__ = ("_bytes", "_chars", "_decoder", "_seen")

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()
        self._decoder = getincrementaldecoder("utf-8")()
        self._seen = self._chars = 0

    def within(self, num_bytes: int) -> int:
        self._chars += len(self._decoder.decode(self._bytes[self._seen : num_bytes]))
        self._seen = max(self._seen, num_bytes)
        return self._chars


@dataclass(slots=True)
class _Anchor:
    """A text that was found in the rendered prompt, or one of the two ends of the prompt. `text` has the
    place in the prompt. Places must be asked for in ascending order.
    """

    text: Text
    rendered_start: int
    rendered_end: int
    counted: _Characters | None = None

    def place(self, byte: int, *, after: _Anchor) -> int:
        """Return the place in `rendered`, in characters, of a place that comes after the text before and not
        after this text's end.
        """
        text = self.text
        if byte < text.start:
            gap = text.start - after.text.end
            share = (byte - after.text.end) / gap if gap else 0.0
            return after.rendered_end + int(share * (self.rendered_start - after.rendered_end))
        into = byte - text.start
        if text.end - text.start != len(text.text):  # some characters have several bytes
            self.counted = self.counted or _Characters(text.text)
            into = self.counted.within(into)
        return min(self.rendered_start + into, self.rendered_end)


def _anchors(prompt_bytes: int, rendered: str, texts: Sequence[Text]) -> list[_Anchor]:
    """Return the beginning, every text that was found, and the end."""
    anchors = [_Anchor(Text(0, "", 0), 0, 0)]
    at = missed = 0
    for text in texts:
        if missed > _MOST_MISSED:
            break
        content, start = text.text, rendered.find(text.text, at)
        if start < 0:  # many templates strip white space
            content = text.text.strip()
            start = rendered.find(content, at)
            if start < 0 or not content:
                missed += 1
                continue
            lead = len(text.text) - len(text.text.lstrip())
            skipped = len(text.text[:lead].encode())
            text = Text(text.start + skipped, content, text.start + skipped + len(content.encode()))  # noqa: PLW2901 - the part of the text that was found
        if not content:
            continue
        at = start + len(content)
        anchors.append(_Anchor(text, start, at))
    anchors.append(_Anchor(Text(prompt_bytes, "", prompt_bytes), len(rendered), len(rendered)))
    return anchors
