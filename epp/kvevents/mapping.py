"""Maps a routed prompt to the names of its blocks, and to the number of blocks that are complete at the end
of each chunk.

Pure: the model's tokenizer and template are behind the `Language` protocol. Caller: `exact`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from epp.kvevents.alignment import aligned_blocks, chunk_ends, whole_blocks
from epp.kvevents.block_hashes import BlockHasher, BlockName
from epp.kvevents.conversation import Text, UnreadableError, read_conversation
from epp.kvevents.routed_prompts import RoutedPrompt
from epp.kvevents.shaping import Shaping, ShapingError, read_shaping
from epp.request.names import is_digest
from epp.types import ApiKind, InferenceRequest

_TOKEN_ID_BYTES: Final = 4
_MOST_CHARS: Final = 2**20
"""Longest text that is tokenized. A `Language` bounds the tokens, too."""


class UntemplatedError(Exception):
    """The model's template or tokenizer refuses this conversation, or there is none."""


class UnmappedError(Exception):
    """The blocks of a prompt cannot be named. `reason` is a label of a metric."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: Sequence[int]
    ends: Sequence[int]
    """Where each token ends in the text, in characters, in ascending order."""


class Language(Protocol):
    """One model's tokenizer and chat template."""

    def tokens(self, text: str, *, special: bool) -> Tokens:
        """special: include what the tokenizer itself puts around a text, as servers do with plain prompts.

        Raises UntemplatedError. UnreadableError: the text has more tokens than a text may have.
        """
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """arguments: the request's own arguments for the template. Raises UntemplatedError."""
        ...


@dataclass(frozen=True, slots=True)
class Mapped:
    """The arguments of `Knowledge.map`."""

    ends_bytes: Sequence[int]
    """The ends of the leading chunks for which every request with these chunks has the same blocks."""
    blocks: Sequence[BlockName]
    ends_blocks: Sequence[int]
    tokens: int


def map_prompt(
    routed: RoutedPrompt,
    *,
    language: Language | None,
    hasher: BlockHasher,
    block_tokens: int,
    adapter_path: str | None,
) -> Mapped:
    """adapter_path: where the servers loaded the prompt's adapter from, if it names one. Raises
    UnmappedError.
    """
    inference = routed.inference
    if routed.adapter and adapter_path is None:
        raise UnmappedError(f"no path is configured for adapter {routed.adapter}", reason="adapter")
    if is_digest(inference.cache_salt):
        raise UnmappedError("the cache salt is too long to be kept", reason="arguments")
    ids, read = _read(inference, language)
    adapter = (routed.adapter, adapter_path) if adapter_path is not None else None
    blocks = hasher.names(ids, block_tokens=block_tokens, adapter=adapter, cache_salt=inference.cache_salt)
    ends_bytes = chunk_ends(routed.schedule, len(routed.chain))
    if read is None:
        ends = whole_blocks(
            ends_bytes, bytes_per_token=_TOKEN_ID_BYTES, block_tokens=block_tokens, blocks=len(blocks)
        )
    else:
        ends = aligned_blocks(
            ends_bytes,
            prompt_bytes=len(inference.prompt),
            rendered=read.rendered,
            texts=read.texts,
            token_ends=read.token_ends,
            block_tokens=block_tokens,
            blocks=len(blocks),
            to_char=read.plain_chars,
        )
    if not ends:
        raise UnmappedError(
            "the template arguments of the request change the prompt from the start", reason="arguments"
        )
    return Mapped(ends_bytes[: len(ends)], blocks, ends, len(ids))


@dataclass(frozen=True, slots=True)
class _Read:
    """The server's version of a prompt of text."""

    rendered: str
    token_ends: Sequence[int]
    texts: Sequence[Text]
    plain_chars: int
    """Number of leading characters that are the same without the request's own arguments, which the chunks do
    not contain."""


def _read(inference: InferenceRequest, language: Language | None) -> tuple[Sequence[int], _Read | None]:
    """The prompt's token ids, and the text that they come from unless the prompt came as token ids. Raises
    UnmappedError.
    """
    try:
        shaping = read_shaping(inference.shaping)
        if inference.token_ids:
            return _unpacked(inference.prompt), None
        if language is None:
            raise UnmappedError("the model's tokenizer is not configured", reason="tokenizer")
        return _rendered(inference, language, shaping)
    except ShapingError as error:
        raise UnmappedError(f"not followed: {error}", reason="arguments") from error
    except UnreadableError as error:
        raise UnmappedError(f"not followed: {error}", reason="content") from error
    except UntemplatedError as error:
        raise UnmappedError(str(error), reason="template") from error


def _rendered(
    inference: InferenceRequest, language: Language, shaping: Shaping
) -> tuple[Sequence[int], _Read]:
    followed = inference.kind in (ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.MESSAGES)
    if not followed or inference.opaque:
        raise UnreadableError("media or embeddings" if followed else f"the {inference.kind} API")
    if inference.kind is ApiKind.COMPLETIONS:
        text = _short(inference.prompt.decode())
        tokens = language.tokens(text, special=shaping.special_tokens is not False)
        return tokens.ids, _Read(text, tokens.ends, (Text(0, text, len(inference.prompt)),), len(text))
    said = read_conversation(inference.prompt)
    rendered = _short(language.render(said.messages, tools=said.tools, arguments=shaping.arguments))
    plain = language.render(said.messages, tools=said.tools) if shaping.arguments else rendered
    tokens = language.tokens(rendered, special=shaping.special_tokens is True)
    return tokens.ids, _Read(rendered, tokens.ends, said.texts, _alike(plain, rendered))


def _short(text: str) -> str:
    if len(text) > _MOST_CHARS:
        raise UnreadableError(f"a text of {len(text)} characters")
    return text


def _alike(one: str, other: str) -> int:
    """Number of leading characters that are the same."""
    if one == other:
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _unpacked(prompt: bytes) -> Sequence[int]:
    ids = array("I", prompt)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
