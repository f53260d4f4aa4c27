"""Finds the waiting request that goes next, by priority, then by share, then in order, if a server has room
for it. Also says when to search again.

The search does not change the queues. It makes a bounded number of forecasts, and none while no server has
room.
"""

from __future__ import annotations

from math import inf
from typing import Generic

from epp.flow.demoted import Demoted
from epp.flow.flow_settings import LEAST_DELAY_S, LONGEST_DELAY_S
from epp.flow.headroom import Headroom
from epp.flow.queues import Band, Queues
from epp.flow.request import Forecast, Forecaster, QueueItem, T


class Search(Generic[T]):
    def __init__(
        self, queues: Queues[T], forecaster: Forecaster[T], headroom: Headroom[T], demoted: Demoted[T]
    ) -> None:
        self._queues = queues
        self._forecaster = forecaster
        self._headroom = headroom
        self._demoted = demoted
        self.due_at = 0.0
        """The latest time of the next search. A caller that brings a request sets this time to now."""

    def first_of_all(self, *, now: float) -> tuple[QueueItem[T], Forecast] | None:
        """Return the request that is first in order, even if no server has room."""
        for _, band in self._queues.bands():
            for flow in band.by_share(1):
                item = flow.items[0]
                return item, self._forecaster.forecast(item.payload, now=now)
        return None

    def first_that_may_go(self, *, now: float) -> tuple[QueueItem[T], Forecast] | None:
        """Return the first request in order that a server has room for. None: there is none before `due_at`,
        as far as the picker can predict.
        """
        settings = self._queues.settings
        least_s = self._forecaster.least_wait_s(now=now)
        bands = [
            (key, band, self._headroom.of_waiting(key, band, now=now))
            for key, band in self._queues.bands()
            if band.tokens
        ]
        cached_headroom_s = settings.goal_s if settings.nearly_cached_s else 0.0
        missing_s = least_s - max(*[headroom_s for _, _, headroom_s in bands], cached_headroom_s)
        if missing_s > 0:
            self._search_in(missing_s, now=now)
            return None
        forecasts, next_s = settings.max_forecasts, inf
        for key, band, headroom_s in bands:
            busy_s = self._demoted.busy_s(-key[0], now=now) if key[1] else 0.0
            if busy_s > 0:
                next_s = min(next_s, busy_s)
            if least_s > headroom_s:
                next_s = min(next_s, least_s - headroom_s)
                if forecasts < settings.max_forecasts or least_s > cached_headroom_s:
                    continue
            found, forecasts, band_s = self._first_of_band(
                band, headroom_s, forecasts, only_short=busy_s > 0, now=now
            )
            if found is not None:
                return found
            next_s = min(next_s, band_s)
            if forecasts <= 0:
                break
        self._search_in(next_s, now=now)
        return None

    def _first_of_band(
        self, band: Band[T], headroom_s: float, forecasts: int, *, only_short: bool, now: float
    ) -> tuple[tuple[QueueItem[T], Forecast] | None, int, float]:
        """Return the request of the band that may go, how many forecasts are left, and how long until one of
        the examined requests may go. forecasts: how many may be made.
        """
        settings, next_s = self._queues.settings, inf
        for flow in band.by_share(forecasts):
            for item in flow.items[: min(forecasts, settings.forecasts_per_tenant)]:
                forecast = self._forecaster.forecast(item.payload, now=now)
                first = forecasts == settings.max_forecasts
                left_s = item.deadline - now
                room_s = self._headroom.of_request(forecast, headroom_s, left_s=left_s, first=first)
                fits = not only_short or self._demoted.is_short(forecast)
                if forecast.wait_s <= room_s and fits:
                    return (item, forecast), forecasts, next_s
                forecasts -= 1
                if fits:
                    next_s = min(next_s, forecast.wait_s - room_s)
        return None, forecasts, next_s

    def _search_in(self, seconds: float, *, now: float) -> None:
        self.due_at = now + min(LONGEST_DELAY_S, max(LEAST_DELAY_S, seconds))
