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

from epp.kvevents.alignment import Rendered, aligned_blocks, chunk_ends, whole_blocks
from epp.kvevents.block_hashes import BlockHasher
from epp.kvevents.chunks import MappedPrompt
from epp.kvevents.conversation import Text, UnmappedError, read_conversation, read_shaping
from epp.kvevents.routed_prompts import RoutedPrompt
from epp.request.names import is_digest
from epp.types import ApiKind, InferenceRequest

_TOKEN_ID_BYTES: Final = 4
_MOST_CHARS: Final = 2**20
"""Longest text that is tokenized. A `Language` bounds the tokens, too."""


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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model reads it, ready for its answer. arguments: the request's own
        arguments for the template. Raises UnmappedError.
        """
        ...


def map_prompt(
    routed: RoutedPrompt,
    *,
    language: Language | None,
    hasher: BlockHasher,
    block_tokens: int,
    adapter_path: str | None,
) -> MappedPrompt:
    """adapter_path: where the servers loaded the prompt's adapter from, if it names one. Raises
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
    if not ends:
        raise UnmappedError(
            "the template arguments of the request change the prompt from the start", reason="arguments"
        )
    return MappedPrompt(routed.chain[: len(ends)], ends_bytes[: len(ends)], blocks, ends)


def _read(inference: InferenceRequest, language: Language | None) -> tuple[Sequence[int], Rendered | None]:
    """The prompt's token ids, and the text that they come from unless the prompt came as token ids. Raises
    UnmappedError.
    """
    shaping = read_shaping(inference.shaping)
    if inference.token_ids:
        return _unpacked(inference.prompt), None
    if language is None:
        raise UnmappedError("the model's tokenizer is not configured", reason="tokenizer")
    if inference.opaque or inference.kind not in (ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.MESSAGES):
        raise UnmappedError(f"media, embeddings, or the {inference.kind} API", reason="content")
    size = len(inference.prompt)
    if inference.kind is ApiKind.COMPLETIONS:
        text = _short(inference.prompt.decode())
        tokens = language.tokens(text, special=shaping.special_tokens is not False)
        return tokens.ids, Rendered(text, tokens.ends, (Text(0, text, size),), size, len(text))
    said = read_conversation(inference.prompt)
    text = _short(language.render(said.messages, tools=said.tools, arguments=shaping.arguments))
    plain = language.render(said.messages, tools=said.tools) if shaping.arguments else text
    tokens = language.tokens(text, special=shaping.special_tokens is True)
    return tokens.ids, Rendered(text, tokens.ends, said.texts, size, _alike(plain, text))


def _short(text: str) -> str:
    if len(text) > _MOST_CHARS:
        raise UnmappedError(f"a text of {len(text)} characters", reason="content")
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
