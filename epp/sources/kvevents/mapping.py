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

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from epp.base.types import ApiKind, InferenceRequest
from epp.picker.prefix_index.table import end_bytes
from epp.request import canonical
from epp.request.client_names import is_digest
from epp.request.jsontext import decode
from epp.sources.kvevents.decoding import BlockHasher
from epp.sources.kvevents.knowledge import MappedPrompt
from epp.sources.kvevents.routed_prompts import RoutedPrompt

_TOKEN_ID_BYTES: Final = 4
_MOST_CHARS: Final = 2**20
"""Longest text that is tokenized. A `Language` bounds the tokens, too."""
_MOST_MISSED: Final = 256
"""Most texts that may not be found. Each costs a search through the whole prompt. After that, positions are
interpolated."""
_CALL_FIELDS: Final = ("tool_calls", "function_call")


def _as_text(prompt: bytes) -> str:
    """Return the prompt as text, in which each mark between its parts is one character."""
    return prompt.decode("utf-8", "surrogateescape")


_SECTION, _BODY, _PART, _FIELD, _OPAQUE = map(
    _as_text, (canonical.SECTION, canonical.BODY, canonical.PART, canonical.FIELD, canonical.OPAQUE)
)


class UnmappedError(Exception):
    """The blocks of a prompt cannot be named. The text is the reason, a label of a metric."""


class Text(NamedTuple):
    """A piece of text, and where it begins in the prompt, in characters."""

    start: int
    text: str


class Tokens(NamedTuple):
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
    language: Language,
    hasher: BlockHasher,
    block_tokens: int,
    adapter_path: str | None,
) -> MappedPrompt:
    """adapter_path: the path from which the servers loaded the adapter, if the prompt names one. Raises
    UnmappedError.
    """
    inference = routed.inference
    if routed.adapter and adapter_path is None:
        raise UnmappedError("adapter")
    # The salt is too long to be kept, or the request changes how its prompt is rendered.
    if is_digest(inference.cache_salt) or inference.shaped:
        raise UnmappedError("arguments")
    ends_bytes = [end_bytes(routed.schedule, k + 1) for k in range(len(routed.chain))]
    if inference.token_ids:
        ids: Sequence[int] = array("I", inference.prompt).tolist()
        ends_tokens = [end // _TOKEN_ID_BYTES for end in ends_bytes]
    else:
        rendered, texts = _render(inference, language)
        ids, token_ends = language.tokens(rendered, special=inference.kind is ApiKind.COMPLETIONS)
        ends_tokens = align(ends_bytes, inference.prompt, texts, rendered, token_ends)
    adapter = (routed.adapter, adapter_path) if adapter_path is not None else None
    blocks = hasher.names(ids, block_tokens=block_tokens, adapter=adapter, cache_salt=inference.cache_salt)
    return MappedPrompt(routed.chain, blocks, [min(n // block_tokens, len(blocks)) for n in ends_tokens])


def _render(inference: InferenceRequest, language: Language) -> tuple[str, Sequence[Text]]:
    """Return the server's version of a prompt of text, and the texts of the prompt. Raises UnmappedError."""
    if any(inference.media) or inference.kind not in (ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.MESSAGES):
        raise UnmappedError("content")
    if inference.kind is ApiKind.COMPLETIONS:
        rendered = _as_text(inference.prompt)
        texts: Sequence[Text] = [Text(0, rendered)]
    else:
        messages, tools, texts = read_conversation(inference.prompt)
        rendered = language.render(messages, tools=tools)
    if len(rendered) > _MOST_CHARS:
        raise UnmappedError("content")
    return rendered, texts


def read_conversation(prompt: bytes) -> tuple[list[dict[str, Any]], Sequence[Any] | None, list[Text]]:
    """Return the messages, the tools and the texts of a chat's canonical prompt. Raises UnmappedError.

    The messages are as an OpenAI client sends them. A content of several parts is a list of strings.
    """
    before, *sections = _as_text(prompt).split(_SECTION)
    messages: list[dict[str, Any]] = []
    texts: list[Text] = []
    tools: Sequence[Any] | None = None
    at = len(before)
    try:
        for section in sections:
            heading, _, body = section.partition(_BODY)
            if _OPAQUE in section:
                raise UnmappedError("content")  # media or a stored conversation
            if heading == f"{_FIELD}tools":
                tools = decode(body.encode())
            else:
                start = at + len(_SECTION) + len(heading) + len(_BODY)
                messages.append(_message(heading, body, start=start, texts=texts))
            at += len(_SECTION) + len(section)
    except ValueError as error:  # tools or a tool call that cannot be read
        raise UnmappedError("content") from error
    return messages, tools, texts


def _message(heading: str, body: str, *, start: int, texts: list[Text]) -> dict[str, Any]:
    role, *fields = heading.split(_FIELD)
    if not role:
        raise UnmappedError("content")  # a section that is no message
    message: dict[str, Any] = {"role": role}
    for one in fields:
        key, _, value = one.partition("=")
        message["name" if key == "name" else "tool_call_id"] = value
    contents: list[str] = []
    for part in body.split(_PART):
        if not part.startswith(_FIELD):
            contents.append(part)
            texts.append(Text(start, part))
        else:
            label, _, value = part.removeprefix(_FIELD).partition(_FIELD)
            if label == "reasoning":
                message["reasoning"] = message["reasoning_content"] = value
            elif label in _CALL_FIELDS:
                message[label] = decode(value.encode())
            else:
                raise UnmappedError("content")  # a part that is no text
        start += len(part) + len(_PART)
    message["content"] = contents[0] if len(contents) == 1 else contents
    return message


def align(
    ends_bytes: Sequence[int],
    prompt: bytes,
    texts: Sequence[Text],
    rendered: str,
    token_ends: Sequence[int],
) -> list[int]:
    """Return how many tokens of the rendered prompt end within the first bytes of the prompt, for each of
    these numbers of bytes, which ascend. All work is in proportion to the sizes.
    """
    begins = np.frombuffer(prompt + b" ", dtype=np.uint8) & 0xC0 != 0x80  # a character, or a mark
    ends = np.array(ends_bytes)
    counts = np.add.reduceat(begins[: ends[-1]], [0, *ends_bytes[:-1]], dtype=np.int64)
    chars = np.cumsum(counts) - ~begins[ends]  # a character that goes on behind an end is not whole
    here, there = _places(texts, rendered, prompt_chars=int(begins.sum()) - 1)
    places = np.interp(chars, here, there).astype(np.int64)
    found: list[int] = np.searchsorted(np.array(token_ends, dtype=np.int64), places, side="right").tolist()
    return found


def _places(texts: Sequence[Text], rendered: str, *, prompt_chars: int) -> tuple[list[int], list[int]]:
    """Return places in the prompt, and the same places in `rendered`: both ends of each text that is found,
    and both ends of the whole.
    """
    here, there = [0], [0]
    missed = 0
    for start, text in texts:
        if missed > _MOST_MISSED:
            break
        content, found = text, rendered.find(text, there[-1])
        if found < 0:  # many templates strip white space
            content = text.strip()
            found = rendered.find(content, there[-1]) if content else -1
            if found < 0:
                missed += 1
                continue
            start += len(text) - len(text.lstrip())  # noqa: PLW2901 - of the part of the text that was found
        if content:
            here += start, start + len(content)
            there += found, found + len(content)
    if here[-1] < prompt_chars:
        here.append(prompt_chars)
        there.append(len(rendered))
    return here, there
