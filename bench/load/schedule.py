"""When the requests of an open loop are due. Pure: told the time, it says what to send and how long to wait.

A due moment never moves, whatever the server or the generator does: what is late goes out at once, all of it,
and is timed from its due moment. So a server that stops for a second is seen by every request that was due
meanwhile, not by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.trace import Call


@dataclass(frozen=True, slots=True)
class Due:
    """A request whose moment has come."""

    call: Call
    due_at: float


class Schedule:
    """Hands out each call once, in order, no earlier than its moment."""

    def __init__(self, calls: Sequence[Call], *, started_at: float) -> None:
        self._calls = calls
        self._started_at = started_at
        self._next = 0

    @property
    def finished(self) -> bool:
        """All have been handed out."""
        return self._next == len(self._calls)

    def take(self, *, now: float) -> list[Due]:
        """All that are due and have not been handed out."""
        due = []
        while not self.finished and (at := self._due_at(self._next)) <= now:
            due.append(Due(self._calls[self._next], at))
            self._next += 1
        return due

    def wait_s(self, *, now: float) -> float:
        """Until the next one is due. Not when finished."""
        return max(0.0, self._due_at(self._next) - now)

    def _due_at(self, number: int) -> float:
        return self._started_at + self._calls[number].at_s

    def check_integrity(self) -> None:
        assert 0 <= self._next <= len(self._calls)
        assert all(a.at_s <= b.at_s for a, b in zip(self._calls, self._calls[1:], strict=False))


def share(calls: Sequence[Call], *, worker: int, workers: int) -> list[Call]:
    """Every `workers`-th call: what one of several processes sends. Moments stay."""
    return list(calls[worker::workers])
