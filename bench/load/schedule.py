"""Decides when the requests of an open loop are due. From the time it computes which requests to send now and
how long to wait. Pure.

A due moment never moves, whatever the server or the generator does. Late requests are all sent at once, and
timed from their due moments. So if a server stops for a second, every request that was due in this second
shows the stop, not only one.
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
    """Returns each call once, in order, not before its moment."""

    def __init__(self, calls: Sequence[Call], *, started_at: float) -> None:
        self._calls = calls
        self._started_at = started_at
        self._next = 0

    @property
    def finished(self) -> bool:
        """Tell whether all calls have been returned."""
        return self._next == len(self._calls)

    def take(self, *, now: float) -> list[Due]:
        """Return all calls that are due and were not returned yet."""
        due = []
        while not self.finished and (at := self._due_at(self._next)) <= now:
            due.append(Due(self._calls[self._next], at))
            self._next += 1
        return due

    def wait_s(self, *, now: float) -> float:
        """Return the time until the next call is due. Do not call this when the schedule is finished."""
        return max(0.0, self._due_at(self._next) - now)

    def _due_at(self, number: int) -> float:
        return self._started_at + self._calls[number].at_s

    def check_integrity(self) -> None:
        assert 0 <= self._next <= len(self._calls)
        assert all(a.at_s <= b.at_s for a, b in zip(self._calls, self._calls[1:], strict=False))


def share(calls: Sequence[Call], *, worker: int, workers: int) -> list[Call]:
    """Return every `workers`-th call, for one of several processes. The due moments stay the same."""
    return list(calls[worker::workers])
