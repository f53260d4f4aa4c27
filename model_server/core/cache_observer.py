"""What somebody outside hears of the prefix cache's content, as it happens. Callers: the KV cache managers.

The managers call while they plan a step, so an observer only takes notes. Only full blocks are told;
a block stored twice, by two requests that computed the same, is told twice, and so is its removal.
"""

from __future__ import annotations

from typing import Protocol

from model_server.core.hashing import BlockHash
from model_server.core.request import Request


class CacheObserver(Protocol):
    def stored(self, request: Request, *, first: int, end: int) -> None:
        """Blocks [first, end) of the request can be found now, under its `block_hashes`."""

    def removed(self, block_hash: BlockHash) -> None:
        """One block fewer can be found under this hash."""

    def cleared(self) -> None:
        """No block can be found any more. `removed` may have been called for some of them just before."""


class Unobserved:
    """Nobody listens."""

    def stored(self, request: Request, *, first: int, end: int) -> None:
        """Not told to anybody."""

    def removed(self, block_hash: BlockHash) -> None:
        """Not told to anybody."""

    def cleared(self) -> None:
        """Not told to anybody."""
