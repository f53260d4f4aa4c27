"""Alarms for waiting requests. An alarm is the time at which a request is considered again even if no event
happens before: the latest time at which it can start, or the time at which it expires.

Invariants: each waiting request that will ever be due has one alarm. No other request is kept here, because
its prompt may be large. The times of requests that have left are skipped, and removed before they are more
than half of all times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from math import inf
from typing import Generic

from epp.picker.flow.request import QueueItem, T


class Alarms(Generic[T]):
    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []
        """Times and numbers of requests, as a heap."""
        self._items: dict[int, QueueItem[T]] = {}
        """The requests that have an alarm, by number."""

    @property
    def due_at(self) -> float:
        return self._times[0][0] if self._times else inf

    def set(self, item: QueueItem[T], at: float) -> None:
        """Set the next alarm of a request that has none. The request also gets one when it expires."""
        at = min(at, item.expires_at)
        if at < inf:
            self._items[item.number] = item
            heapq.heappush(self._times, (at, item.number))

    def due(self, *, now: float) -> Iterator[QueueItem[T]]:
        """Take out each request whose alarm is due."""
        while self._times and self._times[0][0] <= now:
            item = self._items.pop(heapq.heappop(self._times)[1], None)
            if item is not None:
                yield item

    def forget(self, item: QueueItem[T]) -> None:
        """Remove the alarm of a request that no longer waits."""
        items = self._items
        items.pop(item.number, None)
        if not items:
            self._times.clear()
        elif len(self._times) > 2 * len(items) + 32:
            self._times = [time for time in self._times if time[1] in items]
            heapq.heapify(self._times)

    def check_integrity(self, waiting: Iterable[QueueItem[T]]) -> None:
        due = {item.number for item in waiting if min(item.expires_at, item.deadline) < inf}
        assert self._items.keys() == due
        assert sorted(number for _, number in self._times if number in due) == sorted(due)
        assert len(self._times) <= 2 * len(due) + 64
