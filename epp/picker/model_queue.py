"""The queue of one base model in front of the picker, and the picker's forecasts for it.

`flow` knows no servers and asks `ModelQueue` for forecasts, which are the picker's own choices. `gate`
owns one `ModelQueue` for each base model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest
from math import inf
from typing import Final

from epp.base.errors import PickError
from epp.config.flow import Flow
from epp.picker.commit import Considered
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.flow.accounts import OTHERS_LABEL, FlowStatus, WaitingTenant
from epp.picker.flow.control import Decided, FlowControl, Forecast
from epp.picker.flow.queues import OTHERS, Band, QueueItem
from epp.picker.picker import Picker
from epp.picker.server_caches import Prompt

Answer = Callable[[Pick | PickError, float], None]
"""A function that is called once for a request that waited, with its pick or its refusal, and the time."""

_MOST_TENANTS: Final = 32
"""At most this many waiting tenants are shown to people."""


class WaitingRequest:
    """A waiting request. The caller passes it to `Gate.leave` if the client leaves."""

    __slots__ = ("decided", "item", "prompt", "question", "queue")

    def __init__(self, question: Question, prompt: Prompt, queue: ModelQueue, decided: Answer) -> None:
        self.question = question
        self.prompt = prompt
        self.queue = queue
        self.decided = decided
        self.item: QueueItem[WaitingRequest] | None = None
        """None once the request does not wait any more."""


class ModelQueue:
    """The queue of one base model, with the picker's forecasts for it."""

    def __init__(self, picker: Picker, model: str, settings: Flow) -> None:
        self._picker = picker
        self.model = model
        self._last: tuple[WaitingRequest, Considered] | None = None
        """The last request with a forecast, and the picker's choice behind the forecast."""
        self.control: FlowControl[WaitingRequest] = FlowControl(settings, self)
        self.unknown_objectives = 0
        """The number of requests with an objective for which no priority is set."""

    def least_wait_s(self, *, now: float) -> float:
        return self._picker.least_wait_s(self.model, now=now)

    def forecast(self, payload: WaitingRequest, *, now: float) -> Forecast:
        try:
            considered = self._picker.consider(payload.question, prompt=payload.prompt, now=now)
        except PickError:
            return Forecast(0.0, 0.0, 0.0, 1)
        self._last = (payload, considered)
        left_s = payload.item.deadline - now if payload.item is not None else 0.0
        return forecast_of(considered, left_s=left_s)

    def status(self, *, now: float) -> FlowStatus:
        control = self.control
        waiting = {band.priority: band.load for band in control.waiting()}
        return FlowStatus(
            model=self.model,
            oldest_s=control.oldest_s(now=now),
            requests={priority: load.requests for priority, load in waiting.items()},
            tokens={priority: load.tokens for priority, load in waiting.items()},
            tenants=_longest(control.waiting()),
            let_go_tokens=dict(control.shares.tokens),
            unknown_objectives=self.unknown_objectives,
        )

    def next(self, *, now: float) -> Decided[WaitingRequest] | None:
        """Return the next decision (`FlowControl.next`)."""
        decided = self.control.next(now=now)
        if decided is None or decided[1] is not None:
            self._last = None  # the request of the last forecast may leave, and its prompt must be freed
        return decided

    def considered(self, waiting: WaitingRequest, *, now: float) -> Considered:
        """Return the choice behind the forecast that let this request go a moment ago. Raises PickError if no
        server can take the request any more.
        """
        last, self._last = self._last, None
        if last is not None and last[0] is waiting:
            return last[1]
        return self._picker.consider(waiting.question, prompt=waiting.prompt, now=now)


def _longest(bands: Sequence[Band[WaitingRequest]]) -> Sequence[WaitingTenant]:
    """Return the tenants with the most waiting tokens."""
    flows = [flow for band in bands for flow in band.flows.values() if flow.items]
    return [
        WaitingTenant(
            priority=flow.band.priority,
            tenant=OTHERS_LABEL if flow.tenant == OTHERS else flow.tenant,
            requests=flow.load.requests,
            tokens=flow.load.tokens,
        )
        for flow in nlargest(_MOST_TENANTS, flows, key=lambda flow: flow.load.tokens)
    ]


def forecast_of(considered: Considered, *, left_s: float) -> Forecast:
    """Return the forecast for a request. left_s: the time to its deadline. The other servers are considered
    only if the chosen server would miss the deadline.
    """
    weighed, place = considered.choice.weighed, considered.choice.places[0]
    snapshot, uncached, load_s = weighed.seen, weighed.uncached_tokens, weighed.load_s
    rate, tokens = snapshot.rate.item(place), uncached.item(place)
    wait_s, own_s = snapshot.undone_tokens.item(place) / rate, tokens / rate
    if load_s is not None:
        own_s += load_s.item(place)
    soonest_s = wait_s + own_s
    if soonest_s > left_s:
        each_s = (snapshot.undone_tokens + uncached) / snapshot.rate
        soonest_s = float((each_s if load_s is None else each_s + load_s).min())
    most = considered.question.inference.max_tokens
    return Forecast(wait_s, soonest_s, own_s, int(tokens), inf if most is None else float(most))
