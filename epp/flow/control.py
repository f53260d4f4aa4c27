"""Flow control: decides for each request whether it goes now, waits, or is refused.

A request that would have to wait at its server waits here instead. Here it can still be sent to another
server, overtaken, or cancelled at no cost. This module owns the waiting requests, their order and their
bounds. It knows no bodies, no servers and no wire format: a request is an opaque payload, and `Forecaster`
gives the picker's forecast for the request. Every method is synchronous, and time is an argument.

How a caller uses it: `offer` each request. If `offer` returns no decision, the request waits. Later `next`
returns the request, or the caller takes it back with `leave`. Call `next` until it returns None, after each
event that may have freed a server or brought a request, and at `due_at`. The caller must send each `LetGo`,
which books it, before calling `next` again.

Invariants: each offered request is let go once, or is refused once, or leaves. The waiting requests are
within every bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from math import inf
from typing import Generic

from epp.flow.alarms import Alarms
from epp.flow.bounds import Bounds
from epp.flow.demoted import Demoted
from epp.flow.elsewhere import Elsewhere, FlowKey, Row
from epp.flow.expected import Expected
from epp.flow.flow_settings import FlowSettings
from epp.flow.headroom import Headroom
from epp.flow.pace import Pace
from epp.flow.queues import Load, Queues, TenantFlow
from epp.flow.request import Forecast, Forecaster, LetGo, QueueItem, Refused, RefusedFor, T, Verdict
from epp.flow.search import Search
from epp.flow.shares import Shares


class FlowControl(Generic[T]):
    def __init__(self, settings: FlowSettings, forecaster: Forecaster[T]) -> None:
        self._forecaster = forecaster
        self._elsewhere = Elsewhere()
        self._queues: Queues[T] = Queues(settings, self._elsewhere.by_tenant)
        self._numbers = count()
        self._alarms: Alarms[T] = Alarms()
        self._shed: deque[Refused[T]] = deque()
        self._pace = Pace()
        self._shares = Shares()
        self._draining = False
        self._expected = Expected()
        self._demoted: Demoted[T] = Demoted(forecaster, self._queues, self._elsewhere)
        self._headroom: Headroom[T] = Headroom(
            settings, self._pace, self._expected, self._elsewhere, self._demoted
        )
        self._search = Search(self._queues, forecaster, self._headroom, self._demoted)
        self._bounds = Bounds(self._queues, self._elsewhere)
        self._none_free = False
        """While alarms are checked: no server was found free for demoted requests."""

    def __len__(self) -> int:
        return len(self._queues)

    # -- one request -----------------------------------------------------------------------------------------

    def passes(
        self, forecast: Forecast, *, priority: int, tenant: str, ttft_s: float | None, now: float
    ) -> TenantFlow[T] | None:
        """Let a new request go at once if it need not wait; most requests need not. Return the flow of the
        tenant that is charged for the request. None: call `offer`; nothing is charged yet.
        """
        queues = self._queues
        settings = queues.settings
        if queues.in_all.requests and not self._draining:
            return None
        due_s = settings.ttft_s if ttft_s is None else ttft_s
        late = forecast.soonest_s > due_s
        if late and settings.when_late == "refuse" and not self._draining:
            return None
        flow = queues.flow(priority, tenant)
        priority = flow.band.priority
        self._expected.came(priority, flow.tenant, now=now)
        if (late or forecast.wait_s > 0 or self._elsewhere.in_all.requests) and not self._draining:
            headroom_s = self._headroom.of_band((-priority, False), flow.band, 0, flow.tag, now=now)
            if late:
                if headroom_s < inf or self._demoted.busy_s(priority, now=now):
                    return None  # other requests gain if this one is demoted
                self._count_late(forecast, due_s=due_s, now=now)
            elif forecast.wait_s > self._headroom.of_request(forecast, headroom_s, left_s=due_s, first=True):
                return None
        if settings.when_late == "demote":
            self._demoted.came(forecast, now=now)
        self._charge(flow, forecast, late=late, now=now)
        return flow

    def offer(
        self,
        payload: T,
        forecast: Forecast,
        *,
        priority: int,
        tenant: str,
        size_bytes: int,
        ttft_s: float | None,
        longest_s: float,
        now: float,
    ) -> tuple[QueueItem[T], Verdict[T] | None]:
        """Take a new request. Return its item, and the decision if there is one at once. None: the request
        waits, and `next` returns it later. The request may push out waiting requests: `next` returns those.

        ttft_s: the request's own deadline, in seconds from now. longest_s: the longest time that the request
        can wait, whatever the settings say.
        """
        queues = self._queues
        settings = queues.settings
        due_s = settings.ttft_s if ttft_s is None else ttft_s
        passed = self.passes(forecast, priority=priority, tenant=tenant, ttft_s=ttft_s, now=now)
        late = passed is None and forecast.soonest_s > due_s
        demotes = settings.when_late == "demote"
        if passed is not None:
            priority, tenant = passed.band.priority, passed.tenant
        else:
            priority = queues.priority(priority)
            tenant = queues.tenant(tenant, priority=priority, late=late and demotes)
            self._expected.came(priority, tenant, now=now)
        item = QueueItem(
            payload,
            number=next(self._numbers),
            priority=priority,
            tenant=tenant,
            size_bytes=size_bytes,
            tokens=max(1, forecast.tokens),
            arrived_at=now,
            deadline=now + due_s,
            expires_at=now + min(longest_s, settings.ttl_of(priority)),
        )
        place = settings.place(arrived_at=now, deadline=item.deadline, own_s=forecast.own_s)
        item.key = (place, item.number)
        if passed is not None:
            return item, LetGo(item)
        if late:
            self._count_late(forecast, due_s=due_s, now=now)
            if not demotes:
                return item, self._refusal(item, "deadline", now=now)
        if demotes:
            self._demoted.place(item, forecast, now=now)
            if late:
                self._demoted.demote(item)
        victims = self._bounds.admit(item)
        if item in victims:
            return item, self._refusal(item, "full", now=now)
        self._demoted.came(forecast, now=now)
        self._shed.extend([self._refusal(victim, "full", now=now) for victim in victims])
        self._alarms.set(item, forecast, now=now)
        self._search.due_at = min(self._search.due_at, now)
        return item, None

    def leave(self, item: QueueItem[T]) -> None:
        """Take back a request whose client is gone. Do nothing if the request no longer waits."""
        if item.waits:
            self._queues.take(item)
            self._alarms.forget(item)
        elif self._shed:  # it may have been pushed out, and `next` has not returned it yet
            self._shed = deque(refused for refused in self._shed if refused.item is not item)

    def next(self, *, now: float) -> Verdict[T] | None:
        """Return the next decision, about the most pressing request first. None: nothing more can be decided
        at this moment.
        """
        if self._shed:
            return self._shed.popleft()
        verdict = None if self._draining else self._check_alarms(now=now)
        if verdict is not None or not self._queues:
            return verdict
        search = self._search
        found = search.first_of_all(now=now) if self._draining else search.first_that_may_go(now=now)
        return self._take_and_go(*found, now=now) if found is not None else None

    @property
    def due_at(self) -> float:
        """Return the latest time at which `next` must be called. Infinity means that no call is due before
        something happens.
        """
        if self._shed:
            return 0.0
        if not self._queues:
            return inf
        return min(self._alarms.due_at, self._search.due_at)

    # -- the operator ----------------------------------------------------------------------------------------

    def apply(self, settings: FlowSettings, *, now: float) -> None:
        """Apply new settings. Waiting requests keep their deadlines and their places. Requests beyond the new
        bounds are removed.
        """
        self._queues.settings = self._headroom.settings = settings
        for victim in self._bounds.over_by_settings():
            self._shed.append(self._refusal(victim, "full", now=now))
        self._search.due_at = min(self._search.due_at, now)

    def drain(self) -> None:
        """Let no request wait from now on. `next` lets all waiting requests go, in order."""
        self._draining = True
        self._search.due_at = 0.0

    # -- other pickers of the same servers -------------------------------------------------------------------

    def take_charges(self) -> Mapping[FlowKey, int]:
        """Return the tokens let go since the last call (`Shares.take_unreported`)."""
        return self._shares.take_unreported()

    def loads(self) -> Mapping[FlowKey, Load]:
        """Return the requests that wait at this picker."""
        return {(-band[0], tenant, band[1]): load for band, tenant, load in self._queues.flows()}

    def take_reports(self, picker: bytes, rows: Sequence[Row], *, now: float) -> None:
        """Take a report of another picker: the tokens that it let go, and the requests that wait there. This
        may push out requests that wait here; `next` returns those.
        """
        queues = self._queues
        for row in rows:
            priority = queues.priority(row.priority)
            if row.let_go_tokens:
                tenant = queues.tenant(row.tenant, priority=priority, late=row.late)
                queues.charge(priority, tenant, row.let_go_tokens, late=row.late)
                self._pace.elsewhere.add(row.let_go_tokens, now=now)
            self._elsewhere.replace(picker, row._replace(priority=priority), now=now)
        self._search.due_at = min(self._search.due_at, now)
        if not self._draining:
            for victim in self._bounds.over_in_pool(now=now):
                self._shed.append(self._refusal(victim, "full", now=now))

    def forget(self, picker: bytes) -> None:
        """Forget another picker, which is gone or reports everything again from the start."""
        self._elsewhere.forget(picker)

    # -- figures ---------------------------------------------------------------------------------------------

    def waiting(self) -> Mapping[int, Load]:
        """Return the waiting requests, by priority. Callers must not change the loads."""
        return self._queues.by_priority

    @property
    def shares(self) -> Shares:
        """Return the tokens that each tenant has had. Callers must not change them."""
        return self._shares

    @property
    def demoted(self) -> int:
        """Return the number of requests that were demoted so far."""
        return self._demoted.requests

    def oldest_s(self, *, now: float) -> float:
        """Return the age of the request that has waited longest. This looks at every request, so call it for
        a scrape, not for each request.
        """
        return max((now - item.arrived_at for item in self._queues), default=0.0)

    def saturation(self, *, now: float) -> float:
        """Return the saturation (`Pace.saturation`)."""
        wait_s = self._forecaster.least_wait_s(now=now)
        tokens = self._queues.in_all.tokens + self._elsewhere.in_all.tokens
        return self._pace.saturation(wait_s, tokens, goal_s=self._queues.settings.goal_s, now=now)

    def check_integrity(self) -> None:
        self._queues.check_integrity()
        self._elsewhere.check_integrity()
        assert not self._bounds.scopes_over()
        self._alarms.check_integrity(self._queues)

    # -- parts -----------------------------------------------------------------------------------------------

    def _goes_late(self, item: QueueItem[T], *, now: float) -> bool:
        """Return whether a waiting request that cannot be in time any more goes at once, because demoting it
        would help no other request: so few requests wait that the order of arrival is kept, and no request is
        expected to overtake this one.
        """
        priority = item.priority
        if self._waits_above(priority) or not self._demoted.helps_little(priority, now=now):
            return False
        band = self._queues.band(priority, late=False)
        headroom_s = self._headroom.of_waiting((-priority, False), band, now=now)
        return headroom_s == inf and not self._demoted.busy_s(priority, now=now)

    def _count_late(self, forecast: Forecast, *, due_s: float, now: float) -> None:
        """Count a late request. If even an idle server could not serve the request in time, the request says
        nothing about the servers, and it is not counted.
        """
        if forecast.own_s <= due_s:
            self._pace.too_late(forecast.tokens, now=now)
            if self._queues.settings.when_late == "demote":
                self._demoted.could_be_in_time(forecast, now=now)

    def _turn(self, item: QueueItem[T], *, now: float) -> LetGo[T] | None:
        """Let a demoted request go if its turn has come and a server is free for demoted requests. After its
        longest wait, the request goes even if no such server is free. None: it gets its next alarm.
        """
        goes = now >= item.turn_at and not self._waits_above(item.priority)
        if goes and now < item.last_at and not item.short:
            self._none_free = self._none_free or self._demoted.busy_s(item.priority, now=now) > 0
            goes = not self._none_free
        if goes:
            return self._take_and_go(item, self._forecaster.forecast(item.payload, now=now), now=now)
        self._alarms.set(item, None, now=now)
        return None

    def _take_and_go(
        self, item: QueueItem[T], forecast: Forecast, *, late: bool = False, now: float
    ) -> LetGo[T]:
        """Let the request go. late: it goes late although it was not demoted."""
        # The tenant is charged before the request is taken. Otherwise the tag of a tenant whose only request
        # waited would be raised to the floor, and the tenant would lose what it had less than others.
        band = self._queues.band(item.priority, late=item.late)
        self._charge(band.flow(item.tenant), forecast, late=late or item.late, now=now)
        self._queues.take(item)
        self._alarms.forget(item)
        return LetGo(item)

    def _charge(self, flow: TenantFlow[T], forecast: Forecast, *, late: bool, now: float) -> None:
        """Charge the tenant for a request that goes now."""
        tokens = forecast.tokens or 1
        flow.charge(tokens)
        if late:
            self._demoted.went_late(forecast, now=now)
        elif self._queues.settings.when_late == "demote":
            self._demoted.could_be_in_time(forecast, now=now)
        self._pace.let_go.add(tokens, now=now)
        self._shares.add(flow.band.priority, flow.tenant, tokens, late=late)

    def _refusal(self, item: QueueItem[T], reason: RefusedFor, *, now: float) -> Refused[T]:
        self._alarms.forget(item)
        before = self._queues.tokens_before(item.priority) + self._elsewhere.tokens_before(item.priority)
        retry_after_s = self._pace.retry_after_s(before + item.tokens, now=now)
        self._pace.refused(item.tokens, now=now)
        return Refused(item, reason, retry_after_s)

    # -- deadlines and ends of life --------------------------------------------------------------------------

    def _check_alarms(self, *, now: float) -> Verdict[T] | None:
        """Check the requests whose alarms are due, until there is a decision about one of them."""
        self._none_free = False
        for item in self._alarms.due(now=now):
            if now >= item.expires_at:
                return self._give_up(item, "ttl", now=now)
            verdict = self._turn(item, now=now) if item.late else self._check_deadline(item, now=now)
            if verdict is not None:
                return verdict
        return None

    def _check_deadline(self, item: QueueItem[T], *, now: float) -> Verdict[T] | None:
        """Refuse or demote a waiting request if it cannot be in time any more."""
        forecast, queues = self._forecaster.forecast(item.payload, now=now), self._queues
        if now + forecast.soonest_s <= item.deadline:
            self._alarms.set(item, forecast, now=now)
            return None
        self._count_late(forecast, due_s=item.deadline - item.arrived_at, now=now)
        if queues.settings.when_late == "refuse":
            return self._give_up(item, "deadline", now=now)
        if self._goes_late(item, now=now):
            return self._take_and_go(item, forecast, late=True, now=now)
        queues.take(item)
        if not item.turn_at:  # the request came while late requests were refused
            self._demoted.place(item, forecast, now=now)
        item.tenant = queues.tenant(item.tenant, priority=item.priority, late=True)
        self._demoted.demote(item)
        queues.put(item)
        if self._bounds.over(item.priority, item.tenant):  # it moved to the full queue of other tenants
            return self._give_up(item, "full", now=now)
        return self._turn(item, now=now)  # its turn may have come before it was late

    def _waits_above(self, priority: int) -> bool:
        """Return whether a request of a higher priority waits, here or elsewhere."""
        return max(self._queues.by_priority) > priority or self._elsewhere.waits_before((-priority, False))

    def _give_up(self, item: QueueItem[T], reason: RefusedFor, *, now: float) -> Refused[T]:
        self._queues.take(item)
        return self._refusal(item, reason, now=now)
