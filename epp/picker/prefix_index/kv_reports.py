"""Reports of servers about their own caches, in chunks. Exact mode corrects the prefix index with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from epp.base.types import ChunkHash, EndpointName

UNDER_WAY_S: Final = 60.0
"""A server may still be about to store a prompt that it got less than this time ago, so a missing prompt
proves nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """By its own events, a server now holds a chain or lost the end of it.

    The server holds the chunks before `held`. If the chain has more, the server lacks the next one, unless
    that chunk was used after `at`: a prompt that is being computed is stored soon.
    """

    server: EndpointName
    chain: Sequence[ChunkHash]
    held: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReport:
    """How much of one chain each server holds. Made when a prompt was routed and its blocks were looked up at
    every server.
    """

    chain: Sequence[ChunkHash]
    held: Mapping[EndpointName, int]
    """Number of chunks that each server holds, for servers that hold any."""
    sure: AbstractSet[EndpointName]
    """Servers that hold no more than `held` says, except for prompts that they got in the
    last `UNDER_WAY_S`."""
    from_chunk: int
    """The report says nothing about prefixes of fewer chunks: such prefixes hold no whole block."""
    to_chunk: int
    """No server ever stored a longer prefix, so our names for its blocks may be wrong. Nothing is removed
    beyond this chunk."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """Facts about one server as a whole."""

    server: EndpointName
    live: bool
    """Whether the picker follows the server's events and the server names blocks as the picker does."""
    known_bytes: int = 0
    """Bytes of prompt text that the server holds by its own events."""


KvReport = ChainReport | LookupReport | ServerReport
