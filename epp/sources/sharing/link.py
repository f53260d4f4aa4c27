"""Defines the interface of links, which carry batches between pickers: Redis (`redis_link`) or a local socket
(`hub`).

A link may be slow, away or full at any time. Each call ends within a few seconds, with its result or with a
LinkError, and the next call tries again. Batches of one picker arrive in order. The numbers of the batches
show whether any were lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LinkError(Exception):
    """The link cannot do this now. `reason` is a short label for metrics."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Received:
    """A batch, and how long ago it was given to the link, by the link's clock."""

    data: bytes | memoryview
    age_s: float


class Link(Protocol):
    async def agree(self, pool: str, mine: bytes) -> bytes:
        """Return the value that all pickers of a pool have in common: `mine`, unless another picker was
        first.
        """

    async def join(self, channel: str) -> None:
        """Join this channel. `read` returns all batches that the link still keeps, the oldest first."""

    async def send(self, batch: bytes) -> None:
        """Send to all pickers of the channel."""

    async def read(self) -> list[Received]:
        """Return the batches since the last call, oldest first, perhaps our own too. Waits about a
        second.
        """

    async def close(self) -> None: ...
