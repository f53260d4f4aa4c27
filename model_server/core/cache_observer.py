"""The events by which an observer follows the content of the prefix cache. Callers: the KV cache managers.

The managers call the observer while they plan a step, so an observer only takes notes. Only full blocks are
reported. A block that two requests computed is stored twice, and reported as stored and as removed twice.
"""

from __future__ import annotations

from typing import Protocol

from model_server.core.hashing import BlockHash
from model_server.core.request import Request


class CacheObserver(Protocol):
    def stored(self, request: Request, *, first: int, end: int) -> None:
        """Note that the blocks [first, end) of the request can now be found under its `block_hashes`."""

    def removed(self, block_hash: BlockHash) -> None:
        """Note that one of the blocks under this hash can no longer be found."""

    def cleared(self) -> None:
        """Note that no block can be found any more. `removed` may have been called for some of them just
        before.
        """


class Unobserved:
    """Ignores all events."""

    def stored(self, request: Request, *, first: int, end: int) -> None: ...

    def removed(self, block_hash: BlockHash) -> None: ...

    def cleared(self) -> None: ...
