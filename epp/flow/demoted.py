"""Requests that were demoted because they can no longer be in time: how many of them may run, and how long
each waits at most.

They run on servers that the requests in time leave free. Each has a turn, which follows from its wait in
order of arrival and from its length. Its longest wait follows from its turn.
"""

from __future__ import annotations

from math import inf

from epp.flow.elsewhere import Elsewhere
from epp.flow.pace import Rate
from epp.flow.request import Forecast, Pool

_MOST_TIMES_ITS_OWN = 4.0
"""A demoted request is overtaken for so many times as long as its prompt takes, at most."""
_AT_LAST = 1.5
"""It goes after so many times the wait until its turn, whatever the servers do."""
_RESERVE = 2.0
"""Servers that are kept for requests that can be in time, for each that they would keep busy, at most."""
_RESERVE_GROWS = 1 / 3
"""By so much for each `goal_s` that a newcomer would wait in order of arrival."""
_MOST_KEPT = 1 / 2
"""The most servers that are kept for requests that can be in time. The others work off what was demoted."""
_BRIEF = 0.5
"""A request that takes so many times `goal_s` to compute is short: it may use every server,
and keeps none from those that can be in time.
"""


class Demoted:
    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere = elsewhere
        self.requests = 0
        """Demoted so far, when they came or while they waited."""
        self._in_time = Rate()
        """Seconds of prefill in a second, of requests that idle servers would serve in time:
        the servers that they would keep busy."""
        self._until: list[float] = []
        """When each demoted request that is computed will be done."""
        self._in_order_s = 0.0
        """How long a newcomer would wait if all went in order of arrival, at `_at`."""
        self._at = -inf
        self._servers = 0
        """0: not known before the first look at them."""

    def none_waits(self) -> None:
        """Here and elsewhere: in order of arrival a newcomer would wait for what is being computed alone."""
        self._in_order_s = 0.0

    def came(self, forecast: Forecast, *, now: float) -> None:
        """A request that goes or waits, in time or not."""
        if self._servers:
            self._drain(now=now)
            self._in_order_s += (1 + self._elsewhere.pickers) * forecast.own_s / self._servers

    def in_order_s(self, pool: Pool, *, now: float) -> float:
        """How long a newcomer would wait if all went in order of arrival."""
        self._drain(now=now)
        self._servers = max(1, pool.servers)
        self._in_order_s = max(self._in_order_s, pool.undone_s)
        return self._in_order_s

    def _drain(self, *, now: float) -> None:
        self._in_order_s = max(0.0, self._in_order_s - (now - self._at))
        self._at = now

    def turn_s(self, forecast: Forecast, pool: Pool, goal_s: float, *, now: float) -> float:
        """How long until its turn, from which on nobody of its priority overtakes it.

        That is when it would go in order of arrival, and later the longer its prompt takes:
        a short prompt that waits is worth more than a long one.
        """
        in_order_s = max(0.0, self.in_order_s(pool, now=now) - forecast.wait_s)
        return in_order_s + min(_MOST_TIMES_ITS_OWN, forecast.own_s / goal_s) * forecast.own_s

    def last_s(self, turn_s: float) -> float:
        """How long it waits at most."""
        return _AT_LAST * turn_s

    def is_short(self, forecast: Forecast, goal_s: float) -> bool:
        """Whether it may use every server."""
        return forecast.own_s <= _BRIEF * goal_s

    def busy_s(self, pool: Pool, goal_s: float, *, now: float) -> float:
        """How long until another demoted request that is not short may go; 0: now.
        Those that can be in time keep as many servers as they would keep busy, and as many again, up to half
        of all, unless all would begin within the goal in order of arrival.
        """
        running = self._until = [until for until in self._until if until > now]
        in_order_s = self.in_order_s(pool, now=now)
        if in_order_s <= goal_s:
            return 0.0
        pickers = 1 + self._elsewhere.pickers
        kept = min(_RESERVE, _RESERVE_GROWS * in_order_s / goal_s) * pickers * self._in_time.per_s(now=now)
        kept = min(kept, _MOST_KEPT * pool.servers)
        most = max(1, int((pool.servers - kept) / pickers))
        return min(running) - now if len(running) >= most else 0.0

    def could_be_in_time(self, forecast: Forecast, *, now: float) -> None:
        """A request that an idle server would serve in time went,
        or was demoted because of what others have to compute.
        """
        self._in_time.add(forecast.own_s, now=now)

    def went_late(self, forecast: Forecast, goal_s: float, *, now: float) -> None:
        if self.is_short(forecast, goal_s):
            return
        self._until = [until for until in self._until if until > now]
        self._until.append(now + forecast.wait_s + forecast.own_s)
