"""The interface of links that carry batches between pickers: Redis (`redis_link`) or a local socket (`hub`).

A link may be slow, away or full at any time. Each call ends within a few seconds, with its result or with a
LinkError, and the next call tries again. Batches of one picker arrive in order. The numbers of the batches
show whether any were lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LinkError(Exception):
    """The link cannot do it now. `reason` is a short label for metrics."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes from the link, and how long ago they were given to it, by its clock."""

    data: bytes
    age_s: float


class Link(Protocol):
    async def agree(self, pool: str, mine: bytes) -> bytes:
        """What all pickers of a pool have in common: `mine`, if no other picker came first."""

    async def join(self, channel: str) -> None:
        """Meet those of this channel from now on; what was said before the call may or may not be read."""

    async def say(self, batch: bytes) -> None:
        """To all of the channel."""

    async def read(self) -> list[Received]:
        """What was said since the last call, oldest first, our own perhaps included.
        Waits a second or so for it.
        """

    async def recover(self) -> None:
        """After an error: see to it that nothing is waited for that cannot come."""

    async def stored(self) -> Received | None:
        """The channel's newest stored table.
        What was said since it was begun is read from the next `read` on, if it is kept.
        """

    async def store(self, table: bytes) -> None: ...

    async def take_turn(self, name: str, *, period_s: float) -> bool:
        """True for one picker of the channel in each period."""

    async def close(self) -> None: ...
