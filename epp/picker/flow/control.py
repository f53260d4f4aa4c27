"""Flow control: decides for each request whether it goes now, waits, or is refused.

A request that would have to wait at its server waits here instead. Here it can still be sent to another
server, overtaken, or cancelled at no cost. This module owns the waiting requests, their order and their
bounds. It knows no bodies, no servers and no wire format: a request is an opaque payload, and `Forecaster`
gives the picker's forecast for the request. Every method is synchronous, and time is an argument.

How a caller uses it: `offer` each request. If it waits, `next` returns it later, or the caller takes it back
with `leave`. Call `next` until it returns None, after each
event that may have freed a server or brought a request, and at `due_at`. The caller must send each request
that goes, which books it, before calling `next` again. `_decide` makes every decision about a forecast.

Invariants: each request goes once, or is refused once, or leaves. The waiting requests are within every
bound. One call of `next` makes at most `_MOST_FORECASTS` forecasts for the search, and one for
each alarm that is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count, islice
from math import inf
from typing import Final, Generic, Literal

from epp.config.flow import Flow
from epp.picker.flow.alarms import Alarms
from epp.picker.flow.bounds import Bounds
from epp.picker.flow.elsewhere import Elsewhere, FlowKey, Row
from epp.picker.flow.pace import Pace
from epp.picker.flow.queues import Band, QueueLoad, Queues, TenantFlow
from epp.picker.flow.request import Forecast, Forecaster, QueueItem, Refusal, RefusedFor, T
from epp.picker.flow.shares import AnswerLengths, Shares

HEADROOM_S: Final = 0.3
"""A request goes when its server is predicted to begin with it within this time. With less, servers idle
between two scrapes, because predictions are that wrong.
"""
LEAST_DELAY_S: Final = 0.01
"""Time between two checks of the same request, or of a fleet that has no room."""
LONGEST_DELAY_S: Final = 1.0
"""The longest time between two checks of a fleet without room, even without any event, since predictions may
be wrong.
"""
_PASSED_OVER_S = 0.25
"""A request whose server is predicted to be busy is passed over for at most this long."""
_SHARE_OF_LEFT = 0.25
"""A request that is just in time at its latest start is looked at again after this share of the time left."""
_ANSWER_WEIGHT = 2.0
"""A token of an answer is charged as this many prompt tokens to compute."""
PATIENCE = 20.0
"""With the order `Shortest`, a request goes before every request that comes later than this many times its
own prefill time.
"""
_MOST_FORECASTS = 4
"""The most forecasts that are made to find one request that may go. Further requests are tried after the next
event."""
_MOST_LOOKED_AT = 32
"""The most requests of one tenant, and the most tenants of one priority, that a search looks at."""

Decided = tuple[QueueItem[T], Refusal | None]
"""A request that waited. It goes, or is refused."""


class FlowControl(Generic[T]):
    def __init__(self, settings: Flow, forecaster: Forecaster[T]) -> None:
        self._forecaster = forecaster
        self._elsewhere = Elsewhere()
        self._queues: Queues[T] = Queues(settings, self._elsewhere.by_tenant)
        self._bounds = Bounds(self._queues, self._elsewhere)
        self._numbers = count()
        self._alarms: Alarms[T] = Alarms()
        self._shed: deque[Decided[T]] = deque()
        self._pace = Pace()
        self._shares = Shares()
        self._answers = AnswerLengths()
        self._draining = False
        self._search_at = inf
        """The latest time of the next search."""

    def __len__(self) -> int:
        return len(self._queues)

    # -- one request -----------------------------------------------------------------------------------------

    def offer(
        self,
        payload: T,
        forecast: Forecast,
        *,
        priority: int,
        tenant: str,
        size_bytes: int,
        left_s: float,
        longest_s: float,
        now: float,
    ) -> TenantFlow[T] | QueueItem[T] | Refusal:
        """Decide about a new request. Return the flow of the tenant that is charged for it, if it goes at
        once; most requests do. Return its item if it waits: `next` returns the request later. Return a
        refusal if the request would come too late, or is worth least of too many. The request may push out
        waiting requests: `next` returns those.

        left_s: the time to its deadline. longest_s: the longest time that the request can wait, whatever the
        settings say.
        """
        settings, flow = self._queues.settings, self._queues.flow(priority, tenant)
        priority = flow.band.priority
        fate = self._decide(forecast, left_s, self._headroom_s(flow.band, flow.tag, now=now))
        if fate == "late":
            return self._refusal(priority, forecast.tokens, "deadline", now=now)
        if fate == "goes" and (self._draining or not self._queues.in_all.requests):
            self._charge(flow, forecast, now=now)
            return flow
        deadline = now + left_s
        item = QueueItem(
            payload,
            number=next(self._numbers),
            priority=priority,
            tenant=flow.tenant,
            size_bytes=size_bytes,
            tokens=max(1, forecast.tokens),
            arrived_at=now,
            deadline=deadline,
            expires_at=now
            + min(longest_s, settings.ttl_by_priority.get(str(priority), settings.ttl_seconds)),
            place=_place(settings.order, arrived_at=now, deadline=deadline, own_s=forecast.own_s),
        )
        victims = self._bounds.admit(item)
        if item in victims:
            return self._refusal(priority, item.tokens, "full", now=now)
        self._alarms.set(item, deadline - forecast.own_s)
        self._shed.extend([self._refused(victim, "full", now=now) for victim in victims])
        self._search_at = now
        return item

    def leave(self, item: QueueItem[T]) -> None:
        """Take back a request whose client is gone. Do nothing if the request no longer waits."""
        if item.waits:
            self._take(item)
        elif self._shed:  # it may have been pushed out, and `next` has not returned it yet
            self._shed = deque(shed for shed in self._shed if shed[0] is not item)

    def answered(self, tenant: str, tokens: int) -> None:
        """Take in how many tokens an answer had that this tenant got."""
        self._answers.learn(tenant, tokens)

    def next(self, *, now: float) -> Decided[T] | None:
        """Return the next decision, about the most pressing request first. None: nothing more can be decided
        at this moment.
        """
        if self._shed:
            return self._shed.popleft()
        for item in self._alarms.due(now=now) if not self._draining else ():
            if now >= item.expires_at:
                return self._refused(item, "ttl", now=now)
            forecast = self._forecaster.forecast(item.payload, now=now)
            left_s = item.deadline - now
            if self._decide(forecast, left_s, inf) == "late":
                return self._refused(item, "deadline", now=now)
            self._alarms.set(item, now + max(LEAST_DELAY_S, left_s - forecast.own_s, _SHARE_OF_LEFT * left_s))
        return self._search(now=now) if self._queues else None

    @property
    def due_at(self) -> float:
        """Return the latest time at which `next` must be called. Infinity means that no call is due before
        something happens.
        """
        if self._shed:
            return 0.0
        return min(self._alarms.due_at, self._search_at) if self._queues else inf

    # -- the operator ----------------------------------------------------------------------------------------

    def apply(self, settings: Flow, *, now: float) -> None:
        """Apply new settings. Waiting requests keep their deadlines and their places. Requests beyond the new
        bounds are removed.
        """
        self._queues.settings = settings
        victims = self._bounds.over_by_settings()
        self._shed.extend([self._refused(victim, "full", now=now) for victim in victims])
        self._search_at = now

    def drain(self) -> None:
        """Let no request wait from now on. `next` lets all waiting requests go, in order."""
        self._draining = True
        self._search_at = 0.0

    # -- other pickers of the same servers -------------------------------------------------------------------

    def take_charges(self) -> Mapping[FlowKey, int]:
        """Return the tokens let go since the last call (`Shares.take_unreported`)."""
        return self._shares.take_unreported()

    def loads(self) -> Mapping[FlowKey, QueueLoad]:
        """Return the requests that wait at this picker. Callers must not change the loads."""
        return self._queues.by_tenant

    def take_reports(self, picker: bytes, rows: Sequence[Row], *, now: float) -> None:
        """Take a report of another picker: the tokens that it let go, and the requests that wait there."""
        for row in rows:
            flow = self._queues.flow(row.priority, row.tenant)
            if row.let_go_tokens:
                flow.charge(row.let_go_tokens)
                self._pace.elsewhere_at = now
            self._elsewhere.replace(picker, row._replace(priority=flow.band.priority))
        self._search_at = min(self._search_at, now)

    def forget(self, picker: bytes) -> None:
        """Forget another picker, which is gone or reports everything again from the start."""
        self._elsewhere.forget(picker)

    # -- figures ---------------------------------------------------------------------------------------------

    def waiting(self) -> Mapping[int, QueueLoad]:
        """Return the waiting requests, by priority. Callers must not change the loads."""
        return self._queues.by_priority

    @property
    def shares(self) -> Shares:
        """Return the tokens that each tenant has had. Callers must not change them."""
        return self._shares

    def oldest_s(self, *, now: float) -> float:
        """Return the age of the request that has waited longest. This looks at every request, so call it for
        a scrape, not for each request.
        """
        return max((now - item.arrived_at for item in self._queues), default=0.0)

    def saturation(self, *, now: float) -> float:
        """Return the saturation (`Pace.saturation`)."""
        wait_s = self._forecaster.least_wait_s(now=now)
        return self._pace.saturation(
            wait_s, self._queues.in_all.tokens, goal_s=self._queues.settings.goal_seconds, now=now
        )

    def check_integrity(self) -> None:
        self._queues.check_integrity()
        self._elsewhere.check_integrity()
        assert not self._bounds.scopes_over()
        self._alarms.check_integrity(self._queues)

    # -- the decision ----------------------------------------------------------------------------------------

    def _decide(
        self, forecast: Forecast, left_s: float, headroom_s: float
    ) -> Literal["goes", "waits", "late"]:
        """Decide about one request by its forecast, the time to its deadline, and the headroom of its
        priority. Whoever calls this for one request also knows which requests stand before it.
        """
        if self._draining:
            return "goes"
        if forecast.soonest_s > left_s:
            return "late"
        return "goes" if forecast.wait_s <= headroom_s else "waits"

    def _headroom_s(self, band: Band[T], tag: float, *, now: float) -> float:
        """Return within which time a server must begin with a request of this band, so that it goes. tag: the
        tokens that the first tenant in order has had.

        While a more pressing request waits at another picker, no request goes. Pickers differ in their
        estimates, so a server that is busy would always seem idle to one of them. If no picker has let a
        request go for a second, the reports may be old, and requests go to idle servers. While a tenant that
        has had fewer tokens waits at another picker, requests go to idle servers, too.
        """
        if self._draining:
            return inf
        if self._elsewhere.waits_above(band.priority):
            return 0.0 if self._pace.rests(now=now) else -inf
        return 0.0 if self._elsewhere.in_all.requests and band.first_tag_elsewhere() < tag else HEADROOM_S

    def _search(self, *, now: float) -> Decided[T] | None:
        """Return the first decision about a request, in order: by priority, then by share, then in the order
        of its tenant. A request that waits for a busy server, which may hold its prefix, is passed over for
        a moment. None: no request may go before `_search_at`, as far as the picker can predict.
        """
        least_s, left = self._forecaster.least_wait_s(now=now), _MOST_FORECASTS
        again_s = LONGEST_DELAY_S
        for band in self._queues.bands():
            flows = band.by_share(_MOST_LOOKED_AT)
            headroom_s = self._headroom_s(band, flows[0].tag, now=now)
            if least_s > headroom_s:
                again_s = min(again_s, least_s - headroom_s)
                continue
            for flow in flows:
                for item in islice(flow.items, _MOST_LOOKED_AT):
                    if item.look_at > now and not self._draining:
                        again_s = min(again_s, item.look_at - now)
                        continue
                    if not left:
                        self._search_at = now + LEAST_DELAY_S
                        return None
                    left -= 1
                    forecast = self._forecaster.forecast(item.payload, now=now)
                    fate = self._decide(forecast, item.deadline - now, headroom_s)
                    if fate == "late":
                        return self._refused(item, "deadline", now=now)
                    if fate == "goes":
                        return self._goes(item, forecast, now=now)
                    item.look_at = now + min(_PASSED_OVER_S, forecast.wait_s - headroom_s)
                    again_s = min(again_s, item.look_at - now)
        self._search_at = now + max(LEAST_DELAY_S, again_s)
        return None

    # -- parts -----------------------------------------------------------------------------------------------

    def _goes(self, item: QueueItem[T], forecast: Forecast, *, now: float) -> Decided[T]:
        # The tenant is charged before the request is taken. Otherwise the tag of a tenant whose only request
        # waited would be raised to the floor, and the tenant would lose what it had less than others.
        self._charge(self._queues.flow(item.priority, item.tenant), forecast, now=now)
        self._take(item)
        return item, None

    def _charge(self, flow: TenantFlow[T], forecast: Forecast, *, now: float) -> None:
        """Charge the tenant for a request that goes now: its prompt, and what its answer will take."""
        tokens = forecast.tokens or 1
        answer = self._answers.expected(flow.tenant, most=forecast.most_answer_tokens)
        cost = tokens + int(_ANSWER_WEIGHT * answer)
        flow.charge(cost)
        self._pace.let_go.add(tokens, now=now)
        self._shares.add(flow.band.priority, flow.tenant, cost)

    def _refused(self, item: QueueItem[T], reason: RefusedFor, *, now: float) -> Decided[T]:
        """Take out a request that is refused. It may have been taken out of the queues before."""
        if item.waits:
            self._queues.take(item)
        self._alarms.forget(item)
        return item, self._refusal(item.priority, item.tokens, reason, now=now)

    def _refusal(self, priority: int, tokens: int, reason: RefusedFor, *, now: float) -> Refusal:
        before = self._queues.tokens_before(priority)
        retry_after_s = self._pace.retry_after_s(before + tokens, now=now)
        self._pace.refused(tokens, now=now)
        return Refusal(reason, retry_after_s)

    def _take(self, item: QueueItem[T]) -> None:
        self._queues.take(item)
        self._alarms.forget(item)


def _place(order: str, *, arrived_at: float, deadline: float, own_s: float) -> float:
    """Return the place of a request among those of its tenant. The smallest goes first."""
    if order == "Deadline":
        return deadline
    return arrived_at + PATIENCE * own_s if order == "Shortest" else arrived_at
