"""Requests that were demoted because they cannot be in time any more:
how many may run, and how long each waits at most.

They run on the servers that requests in time leave free.
None waits much longer than it would have waited in order of arrival.
"""

from __future__ import annotations

from epp.flow.elsewhere import Elsewhere
from epp.flow.pace import Rate
from epp.flow.request import Forecast, Pool

_LATER_THAN_FAIR = 1.5
_RESERVE = 1.3
"""Servers that are kept for requests in time, for each that they use."""


class Demoted:
    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere = elsewhere
        self.requests = 0
        """Demoted so far, when they came or while they waited."""
        self._in_time = Rate()
        """Seconds of prefill in a second, of requests in time: the servers that they use."""
        self._until: list[float] = []
        """When each demoted request that is computed will be done."""

    def fair_at(self, forecast: Forecast, pool: Pool, *, waiting_tokens: int, now: float) -> float:
        """A little later than a request would begin if everything went in order of arrival.

        waiting_tokens: all that wait before it, here and elsewhere.
        """
        in_order_s = pool.undone_s + waiting_tokens / pool.tokens_per_s
        return now + _LATER_THAN_FAIR * in_order_s + (_LATER_THAN_FAIR - 1) * forecast.own_s

    def busy_s(self, servers: int, *, now: float) -> float:
        """How long until another demoted request may go; 0: now.
        Those in time keep as many servers as they use, and a little more.
        """
        running = self._until = [until for until in self._until if until > now]
        pickers = 1 + self._elsewhere.pickers
        in_time = pickers * self._in_time.per_s(now=now)
        most = max(1, int((servers - _RESERVE * in_time) / pickers))
        return min(running) - now if len(running) >= most else 0.0

    def went_in_time(self, forecast: Forecast, *, now: float) -> None:
        self._in_time.add(forecast.own_s, now=now)

    def went_late(self, forecast: Forecast, *, now: float) -> None:
        self._until = [until for until in self._until if until > now]
        self._until.append(now + forecast.wait_s + forecast.own_s)
