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

from epp.flow.request import Forecast, Held, T
from epp.flow.settings import LEAST_DELAY_S, LONGEST_DELAY_S

_SHARE_OF_LEFT = 0.25


class Alarms(Generic[T]):
    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, Held[T]]] = []

    @property
    def due_at(self) -> float:
        return self._alarms[0][0] if self._alarms else inf

    def set(self, held: Held[T], forecast: Forecast | None, *, now: float) -> None:
        """Set the next alarm: for the time at which the request would be too late if the servers stay as busy
        as they are, or after a quarter of the remaining time if that is later. So a request is looked at some
        twenty times in all, and the picker notices what others send at most a quarter of the remaining time
        too late.
        """
        latest = held.expires_at
        if held.late:
            latest = min(latest, _next_look_at(held, now=now))
        elif forecast is not None:
            slack_s = held.deadline - forecast.soonest_s - now
            left_s = held.deadline - forecast.own_s - now
            latest = min(latest, now + max(LEAST_DELAY_S, slack_s, _SHARE_OF_LEFT * left_s))
        if latest < inf:
            heapq.heappush(self._alarms, (latest, held.number, held))

    def due(self, *, now: float) -> Iterator[Held[T]]:
        """Take out each request whose alarm is due and which still waits."""
        while self._alarms and self._alarms[0][0] <= now:
            held = heapq.heappop(self._alarms)[2]
            if held.waits:
                yield held

    def tidy(self, waiting: int) -> None:
        """Remove the alarms of requests that left before their alarm rang. waiting: the number of waiting
        requests.
        """
        if not waiting:
            self._alarms.clear()
        elif len(self._alarms) > 2 * waiting + 32:
            self._alarms = [alarm for alarm in self._alarms if alarm[2].waits]
            heapq.heapify(self._alarms)

    def check_integrity(self, waiting: Iterator[Held[T]]) -> None:
        alarmed, count = {held.number for _, _, held in self._alarms if held.waits}, 0
        for held in waiting:
            count += 1
            assert (held.number in alarmed) == (_ever_due_at(held) < inf)
        assert len(self._alarms) <= 2 * count + 64


def _next_look_at(held: Held[T], *, now: float) -> float:
    """The time of the next look at a demoted request: its turn at first, later now and then until
    it must go.
    """
    if now < held.turn_at:
        return held.turn_at
    soon = now + LONGEST_DELAY_S
    return min(soon, held.last_at) if now < held.last_at else soon


def _ever_due_at(held: Held[T]) -> float:
    return min(held.expires_at, held.turn_at if held.late else held.deadline)
