"""Decides how many demoted requests may run, and how long each of them waits at most. A request is demoted if
it can no longer be in time.

Demoted requests run on servers that are not needed for requests in time. Each waiting request has a turn,
which is fixed when the request comes and counts once the request is demoted. The turn follows from the wait
that the request would have in order of arrival, and from the length of its prompt. The longest wait follows
from the turn.
"""

from __future__ import annotations

from math import inf
from typing import Generic

from epp.flow.elsewhere import Elsewhere
from epp.flow.pace import Rate
from epp.flow.queues import Queues
from epp.flow.request import Forecast, Forecaster, Pool, QueueItem, T

_MOST_TIMES_ITS_OWN = 5.0
"""A demoted request may be overtaken for at most this many times its own prefill time."""
_AT_LAST = 1.5
"""A demoted request goes after this many times the wait until its turn, however busy the servers are."""
_RESERVE = 2.0
"""At most this many servers are kept for requests that can be in time, for each server that such requests
would keep busy.
"""
_RESERVE_GROWS = 1.5
"""The number of kept servers grows by this much for each `goal_s` that a new request would wait in order of
arrival. The first `goal_s` does not count.
"""
_MOST_KEPT = 1 / 2
"""The largest share of the servers that is kept for requests that can be in time. The other servers compute
demoted requests.
"""


class Demoted(Generic[T]):
    def __init__(self, forecaster: Forecaster[T], queues: Queues[T], elsewhere: Elsewhere) -> None:
        self._forecaster = forecaster
        self._queues = queues
        self._elsewhere = elsewhere
        self.requests = 0
        """Requests demoted so far, when they came or while they waited."""
        self._in_time = Rate()
        """Seconds of prefill that arrive in each second with requests that idle servers would serve in time.
        This equals the number of servers that these requests would keep busy.
        """
        self._until: list[float] = []
        """When each demoted request that a server computes will be done. Short requests are left out."""
        self._in_order_s = 0.0
        """How long a new request would wait in order of arrival, as of `_in_order_at`."""
        self._in_order_at = -inf
        self._servers = 0
        """The number of servers when it was last read. 0: it was not read yet."""

    def came(self, forecast: Forecast, *, now: float) -> None:
        """Note that a request came. It goes or waits, and may be in time or late."""
        if self._servers:
            self._drain(now=now)
            self._in_order_s += (1 + self._elsewhere.pickers) * forecast.own_s / self._servers

    def _wait_in_order_s(self, pool: Pool, priority: int, *, now: float) -> float:
        """Return how long a new request of this priority would wait if the requests of its priority and above
        went in order of arrival.

        The wait is at least the time for the requests that are being computed, and at most the time for those
        and for the waiting requests of its priority and above.
        """
        self._drain(now=now)
        self._servers = max(1, pool.servers)
        waiting = self._queues.in_all.tokens + self._elsewhere.in_all.tokens
        most_s = pool.undone_s + waiting / pool.tokens_per_s
        self._in_order_s = min(max(self._in_order_s, pool.undone_s), most_s)
        before = self._queues.tokens_before(priority) + self._elsewhere.tokens_before(priority)
        return min(self._in_order_s, pool.undone_s + before / pool.tokens_per_s)

    def _drain(self, *, now: float) -> None:
        self._in_order_s = max(0.0, self._in_order_s - (now - self._in_order_at))
        self._in_order_at = now

    def place(self, item: QueueItem[T], forecast: Forecast, *, now: float) -> None:
        """Set the turn and the longest wait of a new request that will wait. They count once the request is
        demoted.

        From its turn on, no request of the same priority overtakes the request. The turn is the time at which
        the request would go in order of arrival, plus an extra that grows with its prefill time, since a
        short prompt that waits is worth more than a long one.
        """
        own_s, goal_s = forecast.own_s, self._queues.settings.goal_s
        in_order_s = self._wait_in_order_s(self._forecaster.pool(now=now), item.priority, now=now)
        later_s = min(_MOST_TIMES_ITS_OWN, own_s / goal_s) * own_s
        turn_s = max(0.0, in_order_s - forecast.wait_s) + later_s
        item.turn_at, item.last_at = now + turn_s, now + _AT_LAST * turn_s
        item.short = self.is_short(forecast)

    def demote(self, item: QueueItem[T]) -> None:
        """Demote a request that can no longer be in time. The caller moves it to its new queue."""
        self.requests += 1
        item.late, item.key = True, (item.turn_at, item.number)

    def is_short(self, forecast: Forecast) -> bool:
        """Return whether the request may use every server, since its prefill keeps no request waiting beyond
        the goal.
        """
        return forecast.own_s <= self._queues.settings.goal_s

    def helps_little(self, priority: int, *, now: float) -> bool:
        """Return whether demoting a request helps little, because a new request would begin within the goal
        in order of arrival. This order is then kept: a late request does not wait for long, and the requests
        behind it go soon, too.
        """
        settings = self._queues.settings
        if settings.when_late == "refuse":
            return False
        pool = self._forecaster.pool(now=now)
        return self._wait_in_order_s(pool, priority, now=now) <= settings.goal_s

    def busy_s(self, priority: int, *, now: float) -> float:
        """Return how long until another demoted request of this priority that is not short may go; 0: now.

        For requests that can be in time, up to twice as many servers are kept as these requests would keep
        busy, and at most half of all servers. No server is kept if every request would begin within the goal
        in order of arrival.
        """
        pool, goal_s = self._forecaster.pool(now=now), self._queues.settings.goal_s
        running = self._running(now=now)
        in_order_s = self._wait_in_order_s(pool, priority, now=now)
        if in_order_s <= goal_s:
            return 0.0
        pickers = 1 + self._elsewhere.pickers
        for_each = min(_RESERVE, _RESERVE_GROWS * (in_order_s / goal_s - 1))
        kept = for_each * pickers * self._in_time.per_s(now=now)
        kept = min(kept, _MOST_KEPT * pool.servers)
        most = max(1, int((pool.servers - kept) / pickers))
        return min(running) - now if len(running) >= most else 0.0

    def could_be_in_time(self, forecast: Forecast, *, now: float) -> None:
        """Note that an idle server would serve this request in time. The request went, or it is late because
        of what the servers compute for others.
        """
        self._in_time.add(forecast.own_s, now=now)

    def went_late(self, forecast: Forecast, *, now: float) -> None:
        """Note that a late request goes now, demoted or not."""
        if not self.is_short(forecast):
            self._running(now=now).append(now + forecast.wait_s + forecast.own_s)

    def _running(self, *, now: float) -> list[float]:
        """Remove the requests that are done from `_until`, and return the rest."""
        self._until = [until for until in self._until if until > now]
        return self._until
