"""Defines the interface of links, which carry batches between pickers: Redis (`redis_link`) or a local socket
(`hub`).

A link may be slow, away or full at any time. Each call ends within a few seconds, with its result or with a
LinkError, and the next call tries again. Batches of one picker arrive in order. The numbers of the batches
show whether any were lost.
"""

from __future__ import annotations

from dataclasses import dataclass


class LinkError(Exception):
    """The link cannot do this now. `reason` is a short label for metrics."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Received:
    """A batch or a stored table, and how long ago it was given to the link, by the link's clock. A table may
    be large, so no code copies it whole.
    """

    data: bytes | memoryview
    age_s: float


class Link:
    """A link that keeps no table, and whose pickers have the same hash secret from the start."""

    async def agree(self, pool: str, mine: bytes) -> bytes:  # noqa: ARG002 - for links that have a pool
        """Return the value that all pickers of a pool have in common: `mine`, unless another picker was
        first.
        """
        return mine

    async def join(self, channel: str) -> None:
        """Join this channel. `read` returns all batches that the link still keeps, the oldest first."""
        raise NotImplementedError

    async def send(self, batch: bytes) -> None:
        """Send to all pickers of the channel."""
        raise NotImplementedError

    async def read(self) -> list[Received]:
        """Return the batches since the last call, oldest first, perhaps our own too. Waits about a
        second.
        """
        raise NotImplementedError

    async def stored(self) -> Received | None:
        """Return the newest stored table of the channel. After this, `read` continues with the batches since
        the table was begun, as far as they are kept.
        """
        return None

    async def take_turn(self, *, period_s: float) -> bool:  # noqa: ARG002 - for links that keep a table
        """Return True for only one picker of the channel in each period: this one stores its table."""
        return False

    def position(self) -> bytes:
        """Return up to where this picker has read the batches."""
        return b""

    async def store(self, table: bytes, *, since: bytes) -> None:
        """since: the position when the table was begun."""

    async def close(self) -> None:
        raise NotImplementedError
