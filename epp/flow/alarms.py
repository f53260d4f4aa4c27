"""Alarms for waiting requests: the times at which a request is looked at again although no event happened,
which are its latest start and the end of its life.

Invariant: each waiting request that will ever be due has at least one alarm. Alarms of requests that have
left are skipped, and removed before they are more than half of all alarms.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf
from typing import Generic

from epp.flow.request import Forecast, QueueItem, T
from epp.flow.settings import LEAST_DELAY_S, LONGEST_DELAY_S

_SHARE_OF_LEFT = 0.25


class Alarms(Generic[T]):
    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, QueueItem[T]]] = []

    @property
    def due_at(self) -> float:
        return self._alarms[0][0] if self._alarms else inf

    def set(self, item: QueueItem[T], forecast: Forecast | None, *, now: float) -> None:
        """Set the next alarm: for the time at which the request would be too late if the servers stay as busy
        as they are, or after a quarter of the remaining time if that is later. So a request is looked at some
        twenty times in all, and the picker notices what others send at most a quarter of the remaining time
        too late.
        """
        latest = item.expires_at
        if item.late:
            latest = min(latest, _next_look_at(item, now=now))
        elif forecast is not None:
            slack_s = item.deadline - forecast.soonest_s - now
            left_s = item.deadline - forecast.own_s - now
            latest = min(latest, now + max(LEAST_DELAY_S, slack_s, _SHARE_OF_LEFT * left_s))
        if latest < inf:
            heapq.heappush(self._alarms, (latest, item.number, item))

    def due(self, *, now: float) -> Iterator[QueueItem[T]]:
        """Take out each request whose alarm is due and which still waits."""
        while self._alarms and self._alarms[0][0] <= now:
            item = heapq.heappop(self._alarms)[2]
            if item.waits:
                yield item

    def tidy(self, waiting: int) -> None:
        """Remove the alarms of requests that left before their alarm rang. waiting: the number of waiting
        requests.
        """
        if not waiting:
            self._alarms.clear()
        elif len(self._alarms) > 2 * waiting + 32:
            self._alarms = [alarm for alarm in self._alarms if alarm[2].waits]
            heapq.heapify(self._alarms)

    def check_integrity(self, waiting: Iterator[QueueItem[T]]) -> None:
        alarmed, count = {item.number for _, _, item in self._alarms if item.waits}, 0
        for item in waiting:
            count += 1
            assert (item.number in alarmed) == (_ever_due_at(item) < inf)
        assert len(self._alarms) <= 2 * count + 64


def _next_look_at(item: QueueItem[T], *, now: float) -> float:
    """The time of the next look at a demoted request: its turn at first, later now and then until
    it must go.
    """
    if now < item.turn_at:
        return item.turn_at
    soon = now + LONGEST_DELAY_S
    return min(soon, item.last_at) if now < item.last_at else soon


def _ever_due_at(item: QueueItem[T]) -> float:
    return min(item.expires_at, item.turn_at if item.late else item.deadline)
