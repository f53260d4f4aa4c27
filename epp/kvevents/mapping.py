"""From a routed prompt to the names of its blocks, and to how many of them are complete where each chunk ends.

Pure: what knows a model's tokenizer and template stands behind the `Language` protocol. Caller: `exact`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from epp.kvevents.alignment import aligned_blocks, chunk_ends, whole_blocks
from epp.kvevents.conversation import Text, UnreadableError, read_conversation
from epp.kvevents.hashing import BlockHasher, BlockName
from epp.residency import Routed
from epp.types import ApiKind

_TOKEN_ID_BYTES: Final = 4


class UntemplatedError(Exception):
    """The model's template does not take this conversation, or there is none."""


class UnmappedError(Exception):
    """A prompt whose blocks cannot be named. `reason` is a label of a metric."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: Sequence[int]
    ends: Sequence[int]
    """Where in the text each ends, in characters; never going back."""


class Language(Protocol):
    """One model's tokenizer and chat template."""

    def tokens(self, text: str, *, special: bool) -> Tokens:
        """special: with what the tokenizer itself puts around a text, as servers do with plain prompts."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None) -> str:
        """UntemplatedError."""
        ...


@dataclass(frozen=True, slots=True)
class Mapped:
    """What `Knowledge.map` takes, and the size of it."""

    ends_bytes: Sequence[int]
    blocks: Sequence[BlockName]
    ends_blocks: Sequence[int]
    tokens: int


def map_prompt(
    routed: Routed,
    *,
    language: Language | None,
    hasher: BlockHasher,
    block_tokens: int,
    adapter_path: str | None,
) -> Mapped:
    """adapter_path: where the servers loaded the prompt's adapter from, if it asks for one. UnmappedError."""
    inference = routed.inference
    if routed.adapter and adapter_path is None:
        raise UnmappedError(f"no path is configured for adapter {routed.adapter}", reason="adapter")
    ends_bytes = chunk_ends(routed.schedule, len(routed.chain))
    adapter = (routed.adapter, adapter_path) if adapter_path is not None else None
    if inference.token_ids:
        ids = _unpacked(inference.prompt)
        blocks = hasher.names(
            ids, block_tokens=block_tokens, adapter=adapter, cache_salt=inference.cache_salt
        )
        ends = whole_blocks(
            ends_bytes, bytes_per_token=_TOKEN_ID_BYTES, block_tokens=block_tokens, blocks=len(blocks)
        )
        return Mapped(ends_bytes, blocks, ends, len(ids))
    if language is None:
        raise UnmappedError("the model's tokenizer is not configured", reason="tokenizer")
    rendered, texts, special = _read(routed, language)
    tokens = language.tokens(rendered, special=special)
    blocks = hasher.names(
        tokens.ids, block_tokens=block_tokens, adapter=adapter, cache_salt=inference.cache_salt
    )
    ends = aligned_blocks(
        ends_bytes,
        prompt_bytes=len(inference.prompt),
        rendered=rendered,
        texts=texts,
        token_ends=tokens.ends,
        block_tokens=block_tokens,
        blocks=len(blocks),
    )
    return Mapped(ends_bytes, blocks, ends, len(tokens.ids))


def _read(routed: Routed, language: Language) -> tuple[str, Sequence[Text], bool]:
    """What the server makes tokens of, the texts in it, and whether its tokenizer adds its own tokens."""
    inference = routed.inference
    followed = inference.kind in (ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.MESSAGES)
    if not followed or inference.opaque:
        what = "media or embeddings" if followed else f"the {inference.kind} API"
        raise UnmappedError(f"{what}: not followed", reason="content")
    if inference.kind is ApiKind.COMPLETIONS:
        text = inference.prompt.decode()
        return text, (Text(0, text, len(inference.prompt)),), True
    try:
        conversation = read_conversation(inference.prompt)
        rendered = language.render(conversation.messages, tools=conversation.tools)
    except UnreadableError as error:
        raise UnmappedError(f"{error}: not followed", reason="content") from error
    except UntemplatedError as error:
        raise UnmappedError(str(error), reason="template") from error
    return rendered, conversation.texts, False


def _unpacked(prompt: bytes) -> Sequence[int]:
    ids = array("I", prompt)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
