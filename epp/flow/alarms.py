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

from epp.flow.flow_settings import LEAST_DELAY_S, LONGEST_DELAY_S
from epp.flow.request import Forecast, QueueItem, T

_SHARE_OF_LEFT = 0.25


class Alarms(Generic[T]):
    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []
        """Times and numbers of requests, as a heap."""
        self._items: dict[int, QueueItem[T]] = {}
        """The requests that have an alarm, by number."""

    @property
    def due_at(self) -> float:
        return self._times[0][0] if self._times else inf

    def set(self, item: QueueItem[T], forecast: Forecast | None, *, now: float) -> None:
        """Set the next alarm. It is the time at which the request would be too late if the servers stayed as
        busy as they are, or a quarter of the remaining time from now if that is later. So a request is
        considered some twenty times in all. If other pickers send requests to its server, this picker notices
        after at most a quarter of the remaining time.

        forecast: needed only for a request that is not demoted.
        """
        latest = item.expires_at
        if item.late:
            latest = min(latest, _next_look_at(item, now=now))
        elif forecast is not None:
            slack_s = item.deadline - forecast.soonest_s - now
            left_s = item.deadline - forecast.own_s - now
            latest = min(latest, now + max(LEAST_DELAY_S, slack_s, _SHARE_OF_LEFT * left_s))
        if latest < inf:
            self._items[item.number] = item
            heapq.heappush(self._times, (latest, item.number))

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
        due = {item.number for item in waiting if _ever_due_at(item) < inf}
        assert self._items.keys() == due
        assert sorted(number for _, number in self._times if number in due) == sorted(due)
        assert len(self._times) <= 2 * len(due) + 64


def _next_look_at(item: QueueItem[T], *, now: float) -> float:
    """Return when to consider a demoted request again: first at its turn, then once a second, and when it
    must go.
    """
    if now < item.turn_at:
        return item.turn_at
    soon = now + LONGEST_DELAY_S
    return min(soon, item.last_at) if now < item.last_at else soon


def _ever_due_at(item: QueueItem[T]) -> float:
    return min(item.expires_at, item.turn_at if item.late else item.deadline)
