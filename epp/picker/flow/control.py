"""Flow control: decides for each request whether it goes now, waits, or is refused.

A request that would have to wait at its server waits here instead. Here it can still be sent to another
server, overtaken, or cancelled at no cost. This module owns the waiting requests, their order and their
bounds. It knows no bodies, no servers and no wire format: a request is an opaque payload, and `Forecaster`
gives the picker's forecast for the request. Every method is synchronous, and time is an argument.

How a caller uses it: `offer` each request. If it waits, `next` returns it later, or the caller takes it back
with `leave`. Call `next` until it returns None, after each event that may have freed a server or brought a
request, and at `due_at`. The caller must send each request that goes, which books it, before calling `next`
again. `_decide` makes every decision about a forecast.

Invariants: each request goes once, or is refused once, or leaves. The waiting requests are within every
bound. One call of `next` makes at most `_MOST_FORECASTS` forecasts in vain for the search, and one for each
alarm that is due.
"""

from collections import deque
from heapq import nlargest, nsmallest
from itertools import count, islice
from math import ceil, inf
from operator import attrgetter
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from msgspec import Struct

from epp.base.errors import FlowRefusedError
from epp.config.flow import Flow
from epp.picker.flow.accounts import (
    MOST_SHOWN,
    OTHERS_LABEL,
    AnswerLengths,
    FlowStatus,
    WaitingTenant,
    add_for,
)
from epp.picker.flow.queues import OTHERS, Alarms, QueueItem, Queues, T, TenantFlow

T_contra = TypeVar("T_contra", contravariant=True)
HEADROOM_S: Final = 0.6
"""A request goes when its server is predicted to begin with it within this time. With less, servers idle
between two scrapes, because predictions are that wrong.
"""
_HEADROOM_OF_GREEDY_S = 0.45
"""The same for a greedy tenant while others lose requests, so that their long requests find room."""
_LOST_S = 5.0
"""For this long after such a loss, greedy tenants leave room."""
_WINDOW_S = 10.0
"""Retry-After is computed from what went in this time, as far as `_went` remembers it."""
LEAST_DELAY_S: Final = 0.01
"""Time between two checks of the same request, or of a fleet that has no room."""
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
_MOST_RETRY_S = 3600
"""The longest Retry-After."""
_MOST_FORECASTS = 4
"""The most forecasts that a search makes in vain. Further requests are tried after the next event."""
_REST = 0.125
"""A search in vain does not go on before this share of the time until the first server is idle has passed."""
_PUSHED_OUT = -inf
"""The alarm of a request that was pushed out, and that `next` has not returned yet."""
_MOST_LOOKED_AT = 32
"""The most requests of one tenant, and the most tenants of one priority, that a search looks at."""

_REFUSED_FOR: Final = {
    "flow_deadline": "the first token would come too late",
    "flow_ttl": "no model server became free in time",
    "flow_full": "too many requests wait",  # a bound was reached, and the request was worth least
}
"""What clients are told, by the label of the metric."""


class Forecast(Struct, frozen=True, gc=False):
    """The predicted course of a request if it were sent now."""

    wait_s: float
    """The time until the chosen server begins with the request: B/V. Infinite: no server is ready."""
    own_s: float
    """The time for the prefill of this request and for the loading of its adapter: U/V + T."""
    tokens: int
    """The prompt tokens that the chosen server would compute: U."""
    most_answer_tokens: float = inf
    """The most tokens that the client lets the answer have."""
    choice: Any = None
    """The forecaster's own choice behind the forecast, or its error if no server can take the request, for
    the caller who sends or refuses the request at once.
    """


class Forecaster(Protocol[T_contra]):
    """Predicts the course of requests. Flow control sees nothing else of the picker. The methods book
    nothing.
    """

    def least_wait_s(self, *, now: float) -> float:
        """Return the least B/V of all servers: no server can begin sooner. The method makes one pass over the
        servers and reads no prompt.
        """

    def forecast(self, payload: T_contra, *, left_s: float, now: float) -> Forecast:
        """Return the forecast for one request. left_s: the time to its deadline. If no server can take the
        request, the forecast is a wait of 0, so that the caller gets the error at once; or infinite, if the
        request may wait for a server.
        """


Decided = tuple[QueueItem[T], Forecast | FlowRefusedError]
"""A request that waited. It goes, as this forecast says, or is refused."""


class FlowControl(Generic[T]):
    def __init__(self, settings: Flow, forecaster: Forecaster[T]) -> None:
        self._forecaster = forecaster
        self._queues: Queues[T] = Queues(settings)
        self._numbers = count()
        self._alarms: Alarms[QueueItem[T]] = Alarms()
        self._went: deque[tuple[float, TenantFlow[T], int]] = deque(maxlen=64)
        """The last requests that went: when, for whom, and their tokens to compute."""
        self.let_go_tokens: dict[str, int] = {}
        """Tokens since the start, by tenant. Callers only read them."""
        self.answers = AnswerLengths()
        self._draining = False
        self._search_at = inf
        """The latest time of the next search."""
        self._left, self._left_until = _MOST_FORECASTS, -inf
        """The number of forecasts that may still be in vain until this time."""

    def __len__(self) -> int:
        return self._queues.load.requests

    @property
    def empty(self) -> bool:
        """Return whether no request waits and none waits to be told of its refusal."""
        return not (len(self) or len(self._alarms))

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
    ) -> TenantFlow[T] | QueueItem[T]:
        """Decide about a new request. Return the flow of the tenant that is charged for it, if it goes at
        once; most requests do. Return its item if it waits: `next` returns the request later. Raises
        FlowRefusedError if the request would come too late, or is worth least of too many. The request may
        push out waiting requests: `next` returns those.

        left_s: the time to its deadline. longest_s: the longest time that the request can wait, whatever the
        settings say.
        """
        settings, flow = self._queues.settings, self._queues.flow(priority, tenant)
        priority = flow.band.priority
        fate = self._decide(forecast, left_s)
        if fate == "late":
            if forecast.own_s <= left_s:  # it would be in time if no others had the server
                self._note_loss(flow, now=now)
            raise self._error("flow_deadline", priority, forecast.tokens, now=now)
        first = self._draining or not self._queues.load.requests
        if fate == "goes" and first and not self._leaves_room(forecast, left_s, flow, now=now):
            self._charge(flow, forecast, now=now)
            return flow
        ttl_s = settings.ttl_by_priority.get(str(priority), settings.ttl_seconds)
        item = QueueItem(
            payload=payload,
            place=now + (PATIENCE * forecast.own_s if settings.order == "Shortest" else 0.0),
            number=next(self._numbers),
            priority=priority,
            tenant=flow.tenant,
            size_bytes=size_bytes,
            tokens=max(1, forecast.tokens),
            arrived_at=now,
            deadline=now + left_s,
            expires_at=now + min(longest_s, ttl_s),
        )
        victims = self._queues.admit(item)
        if item in victims:
            raise self._error("flow_full", priority, item.tokens, now=now)
        self._alarms.set(item, item.deadline - forecast.own_s)
        for victim in victims:  # `next` refuses these first
            self._alarms.forget(victim)
            self._alarms.set(victim, _PUSHED_OUT)
        self._search_at = now
        return item

    def leave(self, item: QueueItem[T]) -> None:
        """Take back a request, whether it waits, was pushed out or has been decided."""
        if item.waits:
            self._queues.take(item)
        self._alarms.forget(item)

    def next(self, *, now: float) -> Decided[T] | None:
        """Return the next decision, about the most pressing request first. None: nothing more can be decided
        at this moment.
        """
        for item in self._alarms.due(now=_PUSHED_OUT if self._draining else now):
            if not item.waits:
                return self._refused(item, "flow_full", now=now)
            if now >= item.expires_at:
                return self._refused(item, "flow_ttl", now=now)
            left_s = item.deadline - now
            forecast = self._forecaster.forecast(item.payload, left_s=left_s, now=now)
            if self._decide(forecast, left_s) == "late":
                return self._refused(item, "flow_deadline", now=now)
            self._alarms.set(item, now + max(LEAST_DELAY_S, left_s - forecast.own_s, _SHARE_OF_LEFT * left_s))
        return self._search(now=now) if len(self) else None

    @property
    def due_at(self) -> float:
        """Return the latest time at which `next` must be called. Infinity means that no call is due before
        something happens.
        """
        return min(self._alarms.due_at, self._search_at if len(self) else inf)

    # -- the operator ----------------------------------------------------------------------------------------

    def apply(self, settings: Flow, *, now: float) -> None:
        """Apply new settings. Waiting requests keep their deadlines and their places. Requests beyond the new
        bounds are removed. A drain is over.
        """
        self._draining = False
        self._alarms.set_all(self._queues.apply(settings), _PUSHED_OUT)
        self._search_at = now

    def drain(self) -> None:
        """Let no request wait from now on. `next` lets all waiting requests go, in order."""
        self._draining = True
        self._search_at = 0.0

    # -- figures ---------------------------------------------------------------------------------------------

    def status(self, model: str, *, unknown_objectives: int = 0, now: float) -> FlowStatus:
        """Return what people see of the queue of this model. This looks at every request, so call it for a
        scrape, not for each request.
        """
        bands = self._queues.bands()
        flows = [flow for band in bands for flow in band.waiting()]
        longest = [
            WaitingTenant(
                priority=flow.band.priority,
                tenant=OTHERS_LABEL if flow.tenant == OTHERS else flow.tenant,
                requests=flow.load.requests,
                tokens=flow.load.tokens,
            )
            for flow in nlargest(MOST_SHOWN, flows, key=lambda flow: flow.load.tokens)
        ]
        return FlowStatus(
            model=model,
            oldest_s=max((now - item.arrived_at for flow in flows for item in flow.items), default=0.0),
            requests={band.priority: band.load.requests for band in bands},
            tokens={band.priority: band.load.tokens for band in bands},
            tenants=longest,
            let_go_tokens=dict(self.let_go_tokens),
            unknown_objectives=unknown_objectives,
        )

    # -- the decision ----------------------------------------------------------------------------------------

    def _decide(self, forecast: Forecast, left_s: float) -> Literal["goes", "waits", "late"]:
        """Decide about one request by its forecast and the time to its deadline. Whoever calls this for one
        request also knows which requests stand before it.
        """
        if self._draining:
            return "goes"
        first_token_s = forecast.wait_s + forecast.own_s
        if left_s < (first_token_s if first_token_s < inf else 0.0):  # a server may come until the deadline
            return "late"
        return "goes" if forecast.wait_s <= HEADROOM_S else "waits"

    def _leaves_room(self, forecast: Forecast, left_s: float, flow: TenantFlow[T], *, now: float) -> bool:
        """Return whether a request that may go by its forecast waits, since its tenant is greedy and others
        lose requests to deadlines. If a request of a lower priority waited, it would take the room.
        """
        if forecast.wait_s <= _HEADROOM_OF_GREEDY_S or left_s == inf or self._draining:
            return False
        lost = now - flow.band.lost_at < _LOST_S and self._queues.bands()[-1:] in ([], [flow.band])
        return lost and self._greedy(flow)

    def _greedy(self, flow: TenantFlow[T]) -> bool:
        """Return whether the tenant had half as much again as an even part of what its band had lately."""
        of_band = [(of, tokens) for _, of, tokens in self._went if of.band is flow.band]
        had = sum(tokens for of, tokens in of_band if of is flow)
        return had * len(dict(of_band)) > 1.5 * sum(tokens for _, tokens in of_band)

    def _note_loss(self, flow: TenantFlow[T], *, now: float) -> None:
        """Note that a request is refused for its deadline, if its tenant is not greedy."""
        if not self._greedy(flow):
            flow.band.lost_at = now

    def _search(self, *, now: float) -> Decided[T] | None:
        """Return the first decision about a request, in order: by priority, then by share, then in the order
        of its tenant. A request that waits for a busy server, which may hold its prefix, is passed over for
        a moment. None: no request may go before `_search_at`, as far as the picker can predict.
        """
        self._search_at = now
        least_s = self._forecaster.least_wait_s(now=now)
        if least_s > HEADROOM_S and not self._draining:
            self._search_at = now + max(LEAST_DELAY_S, least_s - HEADROOM_S)
            return None
        if now >= self._left_until:
            self._left, self._left_until = _MOST_FORECASTS, now + _REST * least_s
        again_s = inf
        for band in self._queues.bands():
            for flow in nsmallest(_MOST_LOOKED_AT, band.waiting(), key=attrgetter("tag")):
                for item in islice(flow.items, _MOST_LOOKED_AT):
                    if item.look_at > now and not self._draining:
                        again_s = min(again_s, item.look_at - now)
                        continue
                    if not (self._left or self._draining):
                        self._search_at = max(self._left_until, now + LEAST_DELAY_S)
                        return None
                    left_s = item.deadline - now
                    forecast = self._forecaster.forecast(item.payload, left_s=left_s, now=now)
                    fate = self._decide(forecast, left_s)
                    if fate == "late":
                        return self._refused(item, "flow_deadline", now=now)
                    leaves_room = self._leaves_room(forecast, left_s, flow, now=now)
                    if fate == "goes" and not leaves_room:
                        return self._goes(item, forecast, now=now)
                    self._left -= 1
                    headroom_s = _HEADROOM_OF_GREEDY_S if leaves_room else HEADROOM_S
                    item.look_at = now + min(_PASSED_OVER_S, forecast.wait_s - headroom_s)
                    again_s = min(again_s, item.look_at - now)
        self._search_at = now + max(LEAST_DELAY_S, again_s)
        return None

    # -- parts -----------------------------------------------------------------------------------------------

    def _goes(self, item: QueueItem[T], forecast: Forecast, *, now: float) -> Decided[T]:
        # The tenant is charged before the request is taken. Otherwise the tag of a tenant whose only request
        # waited would be raised to the floor, and the tenant would lose what it had less than others.
        self._charge(self._queues.flow(item.priority, item.tenant), forecast, now=now)
        self.leave(item)
        return item, forecast

    def _charge(self, flow: TenantFlow[T], forecast: Forecast, *, now: float) -> None:
        """Charge the tenant for a request that goes now: its prompt, and what its answer will take."""
        tokens = forecast.tokens or 1
        answer = self.answers.expected(flow.tenant, most=forecast.most_answer_tokens)
        cost = tokens + int(_ANSWER_WEIGHT * answer)
        flow.charge(cost)
        self._went.append((now, flow, tokens))
        add_for(flow.tenant, cost, self.let_go_tokens)

    def _refused(self, item: QueueItem[T], reason: str, *, now: float) -> Decided[T]:
        if reason == "flow_deadline":
            self._note_loss(self._queues.flow(item.priority, item.tenant), now=now)
        self.leave(item)
        return item, self._error(reason, item.priority, item.tokens, now=now)

    def _error(self, reason: str, priority: int, tokens: int, *, now: float) -> FlowRefusedError:
        before = sum(band.load.tokens for band in self._queues.bands() if band.priority >= priority)
        window_s = min(_WINDOW_S, max(0.1, now - self._went[0][0])) if self._went else _WINDOW_S
        went = sum(tokens for at, _, tokens in self._went if now - at <= window_s)
        drain_s = (before + tokens) * window_s / went if went else 0.0  # 0: unknown: nothing went lately
        retry_s = max(1, min(_MOST_RETRY_S, ceil(drain_s)))
        message = f"{_REFUSED_FOR[reason]}; try again in {retry_s} s"
        return FlowRefusedError(message, reason=reason, retry_after_s=retry_s)
