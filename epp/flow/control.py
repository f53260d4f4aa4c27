"""Flow control: says of each request whether it goes now, waits, or is refused.

A request that would have to wait at its server waits here instead, where it can still be placed well, overtaken, or cancelled
for nothing. Owns the waiting requests, their order and their bounds. It does not know bodies, servers or the
wire: a request is an opaque payload, and `Forecaster` tells what the picker predicts for it. Every method is
synchronous; time is an argument.

How a caller uses it: `offer` each request. When it answers None, the request waits, and later comes out of `next` or is taken back
by `leave`. Call `next` until it answers None after each event that may have freed a server or brought a request, and
at `due_at`. Each `LetGo` must be sent, and so booked, before `next` is called again.

Invariants: each offered request is let go once, or refused once, or left; what waits is within every bound.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, inf
from typing import Generic

from epp.flow.bounds import Bounds
from epp.flow.elsewhere import Elsewhere, FlowKey, Row
from epp.flow.expected import Expected
from epp.flow.pace import Pace, Rate
from epp.flow.queues import BandKey, Load, Queues
from epp.flow.request import Forecast, Forecaster, Held, LetGo, Refused, RefusedFor, T, Verdict
from epp.flow.settings import SHORT_S, FlowSettings
from epp.flow.shares import Shares

_LEAST_DELAY_S = 0.01
"""Between two looks at the same request, or at a fleet that has no room."""
_SHARE_OF_LEFT = 0.25
_LONGEST_DELAY_S = 1.0
"""A fleet without room is looked at so often even when nothing happens: predictions err."""
_LATER_THAN_FAIR = 1.5
_RESERVE = 1.3
"""Servers that are kept for requests in time, for each that they use."""
_MAX_RETRY_AFTER_S = 3600
_MOST_CHARGES = 4096
"""Tenants whose tokens other pickers are yet to be told of; while these cannot be told, others are not counted."""
_NEWS_S = 0.1
"""What one picker does is known to the others after about this time."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """For people and metrics: what waits at one priority."""

    requests: int
    size_bytes: int
    tokens: int


class FlowControl(Generic[T]):
    def __init__(self, settings: FlowSettings, forecaster: Forecaster[T]) -> None:
        self._settings = settings
        self._forecaster = forecaster
        self._queues: Queues[T] = Queues()
        self._numbers = count()
        self._alarms: list[tuple[float, int, Held[T]]] = []
        """When to look at a request again: its latest start, or its end of life. Those that left are skipped."""
        self._shed: deque[Refused[T]] = deque()
        self._pace = Pace()
        self._shares = Shares()
        self.demoted = 0
        """Requests that were demoted when they came or while they waited."""
        self._expected = Expected()
        self._in_time = Rate()
        """Seconds of prefill in a second, of requests in time: the servers that they use."""
        self._late_until: list[float] = []
        """When each demoted request that is computed will be done."""
        self._draining = False
        self._room_at = 0.0
        self._elsewhere = Elsewhere()
        self._bounds = Bounds(settings, self._queues, self._elsewhere)
        self._charges: dict[FlowKey, int] | None = None
        """Tokens let go that other pickers have not been told of; None: nobody tells them."""

    def __len__(self) -> int:
        return len(self._queues)

    # -- one request ---------------------------------------------------------------------------------------------

    def offer(
        self,
        payload: T,
        forecast: Forecast,
        *,
        priority: int = 0,
        tenant: str = "",
        size_bytes: int = 0,
        ttft_s: float | None = None,
        longest_s: float = inf,
        now: float,
    ) -> tuple[Held[T], Verdict[T] | None]:
        """A newcomer and what is decided at once; None: it waits, and `next` tells.

        ttft_s: its own deadline, from now. longest_s: the longest that it can wait, whatever the settings say. A newcomer that waits may have pushed out others: `next` names them.
        """
        settings = self._settings
        hopeless = forecast.soonest_s > (settings.ttft_s if ttft_s is None else ttft_s)
        held = self._newcomer(
            payload,
            forecast,
            priority=priority,
            tenant=tenant,
            size_bytes=size_bytes,
            ttft_s=ttft_s,
            longest_s=longest_s,
            late=hopeless and settings.when_late == "demote",
            now=now,
        )
        if self._draining:
            return held, self._go(held, forecast, now=now)
        if hopeless and not held.late:
            return held, self._refusal(held, "deadline", now=now)
        if not self._queues and not held.late:
            headroom_s = self._headroom_s((-held.priority, False), 0, now=now)
            if forecast.wait_s <= self._room_s(held, forecast, headroom_s, first=True, now=now):
                return held, self._go(held, forecast, now=now)
        if held.late:
            held.fair_at = self._fair_at(forecast, now=now)
        victims = self._bounds.admit(held)
        if held in victims:
            return held, self._refusal(held, "full", now=now)
        self._shed.extend([self._refusal(victim, "full", now=now) for victim in victims])
        self._set_alarm(held, forecast, now=now)
        self._room_at = min(self._room_at, now)
        return held, None

    def leave(self, held: Held[T]) -> None:
        """The client is gone. Does nothing where the request no longer waits."""
        if held.waits:
            self._queues.take(held)
            self._tidy()

    def next(self, *, now: float) -> Verdict[T] | None:
        """The next request whose fate is decided, most pressing first; None: nothing more at this moment."""
        if self._shed:
            return self._shed.popleft()
        verdict = None if self._draining else self._ring(now=now)
        if verdict is not None or not self._queues:
            return verdict
        found = self._first_that_may_go(now=now)
        if found is None:
            return None
        return self._take_and_go(*found, now=now)

    @property
    def due_at(self) -> float:
        """When to call `next` at the latest; inf: not before something happens."""
        if self._shed:
            return 0.0
        if not self._queues:
            return inf
        return min(self._alarms[0][0] if self._alarms else inf, self._room_at)

    # -- the operator --------------------------------------------------------------------------------------------

    def apply(self, settings: FlowSettings, *, now: float) -> None:
        """Other settings. What waits keeps its deadline and its place; what is over the new bounds is shed."""
        self._settings = settings
        self._bounds.settings = settings
        for victim in self._bounds.over_by_settings():
            self._shed.append(self._refusal(victim, "full", now=now))
        self._room_at = min(self._room_at, now)

    def drain(self) -> None:
        """The process ends: from now on nothing waits. `next` lets go all that does, in order."""
        self._draining = True
        self._room_at = 0.0

    # -- other pickers of the same servers -----------------------------------------------------------------------

    def take_charges(self) -> Mapping[FlowKey, int]:
        """Tokens let go since the last call, by priority, tenant and whether they were late."""
        charges, self._charges = self._charges, {}
        return charges or {}

    def loads(self) -> Mapping[FlowKey, Load]:
        """What waits here."""
        return {(-band[0], tenant, band[1]): load for band, tenant, load in self._queues.flows()}

    def hear(self, picker: bytes, rows: Sequence[Row], *, now: float) -> None:
        """What another picker let go, and what waits there. May push out what waits here: `next` names it."""
        queues, settings = self._queues, self._settings
        for row in rows:
            priority = queues.priority(row.priority, max_priorities=settings.max_priorities)
            if row.let_go_tokens:
                tenant = queues.tenant(
                    row.tenant, priority=priority, late=row.late, max_tenants=settings.max_tenants
                )
                queues.charge(priority, tenant, row.let_go_tokens, late=row.late)
                self._pace.let_go_elsewhere(row.let_go_tokens, now=now)
            self._elsewhere.hear(picker, row._replace(priority=priority))
        if not self._draining:
            for victim in self._bounds.over_in_pool(now=now):
                self._shed.append(self._refusal(victim, "full", now=now))

    def forget(self, picker: bytes) -> None:
        """Another picker is gone, or tells everything anew."""
        self._elsewhere.forget(picker)

    # -- figures -------------------------------------------------------------------------------------------------

    def waiting(self) -> Mapping[int, Waiting]:
        """By priority."""
        return {of: Waiting(*load.as_tuple()) for of, load in self._queues.by_priority.items()}

    @property
    def shares(self) -> Shares:
        """What each tenant has had. For reading."""
        return self._shares

    def oldest_s(self, *, now: float) -> float:
        """Age of the request that waits longest. Looks at every one: for a scrape, not for a request."""
        return max((now - held.arrived_at for held in self._queues), default=0.0)

    def saturation(self, *, now: float) -> float:
        """0: idle. 1: a newcomer waits as long as the goal says. Above: the fleet is too small for what comes."""
        wait_s = self._forecaster.least_wait_s(now=now)
        tokens = self._queues.in_all.tokens + self._elsewhere.in_all.tokens
        drain_s = self._pace.drain_s(tokens, now=now) if tokens else 0.0
        if drain_s is None:
            drain_s = self._settings.goal_s
        waited = (min(wait_s, _MAX_RETRY_AFTER_S) + drain_s) / self._settings.goal_s
        excess = self._pace.excess(now=now)
        return max(waited, excess) if excess > 1 else waited

    def check_integrity(self) -> None:
        self._queues.check_integrity()
        self._elsewhere.check_integrity()
        assert not self._bounds.scopes_over()
        alarmed = {held.number for _, _, held in self._alarms if held.waits}
        assert alarmed == {held.number for held in self._queues if self._alarm_at(held) < inf}
        assert len(self._alarms) <= 2 * len(self._queues) + 64

    # -- parts ---------------------------------------------------------------------------------------------------

    def _newcomer(
        self,
        payload: T,
        forecast: Forecast,
        *,
        priority: int,
        tenant: str,
        size_bytes: int,
        ttft_s: float | None,
        longest_s: float,
        late: bool,
        now: float,
    ) -> Held[T]:
        settings, queues = self._settings, self._queues
        priority = queues.priority(priority, max_priorities=settings.max_priorities)
        held = Held(
            payload,
            number=next(self._numbers),
            priority=priority,
            tenant=queues.tenant(tenant, priority=priority, late=late, max_tenants=settings.max_tenants),
            size_bytes=size_bytes,
            tokens=max(1, forecast.tokens),
            arrived_at=now,
            deadline=now + (settings.ttft_s if ttft_s is None else ttft_s),
            expires_at=now + min(longest_s, settings.ttl_of(priority)),
        )
        held.late = late
        self.demoted += late
        self._expected.came(priority, held.tenant, now=now)
        held.key = (self._place(held, own_s=forecast.own_s), held.number)
        return held

    def _place(self, held: Held[T], *, own_s: float) -> float:
        settings = self._settings
        if settings.order == "deadline":
            return held.deadline
        if settings.order == "shortest":
            return held.arrived_at + settings.patience * own_s
        return held.arrived_at

    def _first_that_may_go(self, *, now: float) -> tuple[Held[T], Forecast] | None:
        settings, forecaster = self._settings, self._forecaster
        least_s = forecaster.least_wait_s(now=now)
        bands = [
            (key, band, self._headroom_s(key, band.tokens, now=now))
            for key, band in self._queues.bands()
            if band.tokens
        ]
        most_s = max(headroom_s for _, _, headroom_s in bands)
        early_s = settings.goal_s if settings.rides_s else 0.0
        if least_s > max(most_s, early_s):
            self._room_at = now + _delay_s(least_s - max(most_s, early_s))
            return None
        looks, missing_s = settings.max_looks, inf
        for key, band, headroom_s in bands:
            if key[1] and (busy_s := self._late_busy_s(now=now)) > 0:
                missing_s = min(missing_s, busy_s)
                continue
            missing_s = min(missing_s, max(0.0, least_s - headroom_s) or inf)
            if least_s > headroom_s and not (looks == settings.max_looks and least_s <= early_s):
                continue
            for flow in band.by_share(looks):
                for held in flow.items[: min(looks, settings.looks)]:
                    forecast = forecaster.forecast(held.payload, now=now)
                    first = looks == settings.max_looks
                    room_s = self._room_s(held, forecast, headroom_s, first=first, now=now)
                    if forecast.wait_s <= room_s:
                        return held, forecast
                    looks -= 1
                    missing_s = min(missing_s, forecast.wait_s - room_s)
            if looks <= 0:
                break
        self._room_at = now + _delay_s(missing_s)
        return None

    def _room_s(
        self, held: Held[T], forecast: Forecast, headroom_s: float, *, first: bool, now: float
    ) -> float:
        """How soon a server must be free for this request. first: nobody stands before it who waits for room, and would starve."""
        settings = self._settings
        if self._draining:
            return inf
        if headroom_s == inf:
            # Nobody is to overtake it. It waits only for a server on which it would be in time.
            return max(SHORT_S, held.deadline - now - forecast.own_s)
        rides = (
            first and headroom_s >= (settings.headroom_s or SHORT_S) and forecast.own_s <= settings.rides_s
        )
        return max(headroom_s, settings.goal_s) if rides else headroom_s

    def _headroom_s(self, band: BandKey, tokens: int, *, now: float) -> float:
        """How soon a server must be free for a request of this band to go; inf: nobody is to overtake it.

        What is more pressing at another picker goes first. Of those at which equals wait, the one with the most tokens looks first and the
        others later by as long as news of it takes; or all of them would send to the same server at the same moment.
        """
        if self._draining:
            return inf
        if self._elsewhere.waits_before(band):
            return 0.0
        headroom_s = self._settings.headroom_s
        if headroom_s is None:
            in_order = self._settings.order == "arrival"
            if in_order and not self._expected.more_pressing(band, now=now):
                return inf
            headroom_s = SHORT_S
        return headroom_s + _NEWS_S * self._elsewhere.shorter(band, tokens)

    # -- what was demoted ----------------------------------------------------------------------------------------

    def _fair_at(self, forecast: Forecast, *, now: float) -> float:
        """A little later than it would begin if everything went in order of arrival."""
        pool = self._forecaster.pool(now=now)
        tokens = self._queues.in_all.tokens + self._elsewhere.in_all.tokens
        in_order_s = pool.undone_s + tokens / pool.tokens_per_s
        return now + _LATER_THAN_FAIR * in_order_s + (_LATER_THAN_FAIR - 1) * forecast.own_s

    def _late_busy_s(self, *, now: float) -> float:
        """How long until another demoted request may go; 0: now. Those in time keep as many servers as they use, and a little more."""
        running = self._late_until = [until for until in self._late_until if until > now]
        pickers = 1 + self._elsewhere.pickers
        in_time = pickers * self._in_time.per_s(now=now)
        servers = self._forecaster.pool(now=now).servers
        most = max(1, int((servers - _RESERVE * in_time) / pickers))
        return min(running) - now if len(running) >= most else 0.0

    # -- the ends ------------------------------------------------------------------------------------------------

    def _take_and_go(self, held: Held[T], forecast: Forecast, *, now: float) -> LetGo[T]:
        self._queues.take(held)
        verdict = self._go(held, forecast, now=now)
        self._tidy()
        return verdict

    def _go(self, held: Held[T], forecast: Forecast, *, now: float) -> LetGo[T]:
        tokens = forecast.tokens
        if held.late:
            self._late_until = [until for until in self._late_until if until > now]
            self._late_until.append(now + forecast.wait_s + forecast.own_s)
        else:
            self._in_time.add(forecast.own_s, now=now)
        self._queues.charge(held.priority, held.tenant, tokens, late=held.late)
        self._pace.let_go(tokens, now=now)
        self._shares.add(held.tenant, max(1, tokens))
        if self._charges is not None and len(self._charges) < _MOST_CHARGES:
            key = (held.priority, held.tenant, held.late)
            self._charges[key] = self._charges.get(key, 0) + max(1, tokens)
        return LetGo(held)

    def _refusal(self, held: Held[T], reason: RefusedFor, *, now: float) -> Refused[T]:
        before = self._queues.tokens_before(held.priority) + self._elsewhere.tokens_before(held.priority)
        drain_s = self._pace.drain_s(before + held.tokens, now=now)
        self._pace.refused(held.tokens, now=now)
        seconds = min(_MAX_RETRY_AFTER_S, ceil(drain_s)) if drain_s is not None else 1
        return Refused(held, reason, max(1, seconds))

    # -- deadlines and ends of life ------------------------------------------------------------------------------

    def _alarm_at(self, held: Held[T]) -> float:
        return min(held.expires_at, held.fair_at if held.late else held.deadline)

    def _set_alarm(self, held: Held[T], forecast: Forecast | None, *, now: float) -> None:
        """Look again when it could be too late: with the servers as they are now, or as busy as others make them until then.

        What others are sent is seen late by a quarter of the time that is left at most, for some twenty looks in all.
        """
        latest = held.expires_at
        if held.late:
            latest = min(latest, held.fair_at if held.fair_at > now else now + _LONGEST_DELAY_S)
        elif forecast is not None:
            slack_s = held.deadline - forecast.soonest_s - now
            left_s = held.deadline - forecast.own_s - now
            latest = min(latest, now + max(_LEAST_DELAY_S, slack_s, _SHARE_OF_LEFT * left_s))
        if latest < inf:
            heapq.heappush(self._alarms, (latest, held.number, held))

    def _ring(self, *, now: float) -> Verdict[T] | None:
        """Refuse or demote the first that is too late, or let go one that was demoted and has waited long enough."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            held = heapq.heappop(alarms)[2]
            if not held.waits:
                continue
            if now >= held.expires_at:
                return self._give_up(held, "ttl", now=now)
            if held.late:
                if now >= held.fair_at and not self._waits_above(held.priority):
                    return self._take_and_go(held, self._forecaster.forecast(held.payload, now=now), now=now)
                self._set_alarm(held, None, now=now)
                continue
            forecast = self._forecaster.forecast(held.payload, now=now)
            if now + forecast.soonest_s <= held.deadline:
                self._set_alarm(held, forecast, now=now)
            elif self._settings.when_late == "refuse":
                return self._give_up(held, "deadline", now=now)
            else:
                self.demoted += 1
                held.fair_at = self._fair_at(forecast, now=now)
                self._queues.demote(held, max_tenants=self._settings.max_tenants)
                self._set_alarm(held, None, now=now)
        return None

    def _waits_above(self, priority: int) -> bool:
        """Whether a request of a higher priority waits, here or elsewhere."""
        return max(self._queues.by_priority) > priority or self._elsewhere.waits_before((-priority, False))

    def _give_up(self, held: Held[T], reason: RefusedFor, *, now: float) -> Refused[T]:
        self._queues.take(held)
        self._tidy()
        return self._refusal(held, reason, now=now)

    def _tidy(self) -> None:
        """What left by another way than its alarm is forgotten before it is half of all."""
        if not self._queues:
            self._alarms.clear()
        elif len(self._alarms) > 2 * len(self._queues) + 32:
            self._alarms = [alarm for alarm in self._alarms if alarm[2].waits]
            heapq.heapify(self._alarms)


def _delay_s(predicted_s: float) -> float:
    return min(_LONGEST_DELAY_S, max(_LEAST_DELAY_S, predicted_s))
