"""Finds the waiting request that goes next, by priority, by share and in order, as far as servers have room.
Also says when to search again.

The search does not change the queues. It makes a bounded number of forecasts, and none while no server has
room.
"""

from __future__ import annotations

from math import inf
from typing import Generic

from epp.flow.demoted import Demoted
from epp.flow.headroom import Headroom
from epp.flow.queues import Band, Queues
from epp.flow.request import Forecast, Forecaster, QueueItem, T
from epp.flow.settings import LEAST_DELAY_S, LONGEST_DELAY_S, FlowSettings


class Search(Generic[T]):
    def __init__(
        self,
        settings: FlowSettings,
        queues: Queues[T],
        forecaster: Forecaster[T],
        headroom: Headroom[T],
        demoted: Demoted[T],
    ) -> None:
        self.settings = settings
        self._queues = queues
        self._forecaster = forecaster
        self._headroom = headroom
        self._demoted = demoted
        self.due_at = 0.0
        """The latest time of the next search. A caller that brings a request sets this time to now."""

    def first_of_all(self, *, now: float) -> tuple[QueueItem[T], Forecast] | None:
        """Return the request that is first in order, whatever the servers compute."""
        for _, band in self._queues.bands():
            for flow in band.by_share(1):
                item = flow.items[0]
                return item, self._forecaster.forecast(item.payload, now=now)
        return None

    def first_that_may_go(self, *, now: float) -> tuple[QueueItem[T], Forecast] | None:
        settings = self.settings
        least_s = self._forecaster.least_wait_s(now=now)
        bands = [
            (key, band, self._headroom.of_waiting(key, band, now=now))
            for key, band in self._queues.bands()
            if band.tokens
        ]
        most_s = max(headroom_s for _, _, headroom_s in bands)
        early_s = settings.goal_s if settings.rides_s else 0.0
        if least_s > max(most_s, early_s):
            self._look_in(least_s - max(most_s, early_s), now=now)
            return None
        looks, missing_s = settings.max_looks, inf
        for key, band, headroom_s in bands:
            short = key[1] and (busy_s := self._demoted.busy_s(-key[0], now=now)) > 0
            if short:
                missing_s = min(missing_s, busy_s)
            missing_s = min(missing_s, max(0.0, least_s - headroom_s) or inf)
            if least_s > headroom_s and not (looks == settings.max_looks and least_s <= early_s):
                continue
            found, looks, short_s = self._first_of_band(band, headroom_s, looks, short=short, now=now)
            if found is not None:
                return found
            missing_s = min(missing_s, short_s)
            if looks <= 0:
                break
        self._look_in(missing_s, now=now)
        return None

    def _first_of_band(
        self, band: Band[T], headroom_s: float, looks: int, *, short: bool, now: float
    ) -> tuple[tuple[QueueItem[T], Forecast] | None, int, float]:
        """Return which request of the band may go, how many looks are left, and how long until the next of
        the examined requests may go. short: consider only requests with few tokens to compute.
        """
        settings, missing_s = self.settings, inf
        for flow in band.by_share(looks):
            for item in flow.items[: min(looks, settings.looks)]:
                forecast = self._forecaster.forecast(item.payload, now=now)
                first = looks == settings.max_looks
                left_s = item.deadline - now
                room_s = self._headroom.of_request(forecast, headroom_s, left_s=left_s, first=first)
                fits = not short or self._demoted.is_short(forecast)
                if forecast.wait_s <= room_s and fits:
                    return (item, forecast), looks, missing_s
                looks -= 1
                if fits:
                    missing_s = min(missing_s, forecast.wait_s - room_s)
        return None, looks, missing_s

    def _look_in(self, predicted_s: float, *, now: float) -> None:
        self.due_at = now + min(LONGEST_DELAY_S, max(LEAST_DELAY_S, predicted_s))
