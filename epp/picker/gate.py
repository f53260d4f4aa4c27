"""Flow control in front of the picker: a request passes at once, or waits here until it is sent or refused.

The gate connects `flow`, which knows no servers, with the picker, which knows no queue. The forecast for
a request is the picker's own choice, which is committed in the same turn of the event loop. There is one
queue for each base model, since servers of one model cannot relieve those of another. Everything here is
synchronous: there is no task, no clock and no logger. The owner of a timer calls `pump` at `due_at`, and
after events that may have freed a server.

Invariant: each waiting request leaves, or its `OnDecided` is called once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Final

from msgspec import Struct

from epp.base.errors import FlowRefusedError, NotReadyError, PickError
from epp.config.flow import Flow
from epp.config.policy import Policy
from epp.picker.commit import Considered
from epp.picker.decision import Question
from epp.picker.endpoints.served_models import forget_models
from epp.picker.events import Ended, Pick, PickerEvent
from epp.picker.flow.accounts import FlowStatus
from epp.picker.flow.control import Decided, FlowControl, Forecast
from epp.picker.flow.queues import QueueItem, TenantFlow
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import PrefixTable
from epp.picker.server_caches import Prompt
from epp.picker.unserved import AT_ONCE, Unserved, UnservedRequest

OnDecided = Callable[[Pick | PickError, float], None]
"""A function that is called once for a request that waited, with its pick or its refusal, and the time."""


class FlowClaim(Struct, frozen=True, gc=False):
    """What the headers of a request say to flow control."""

    objective: str = ""
    tenant: str = ""
    ttft_s: float | None = None


NO_CLAIM: Final = FlowClaim()


class HeldRequest(Struct, frozen=True, eq=False):
    """A request that may have to wait, as the gate sees it."""

    question: Question
    prompt: Prompt
    table: PrefixTable
    """Another table has taken its place if prompts are cut differently now."""
    queue: ModelQueue
    decided: OnDecided


WaitingRequest = QueueItem[HeldRequest]
"""A waiting request. The caller passes it to `Gate.leave` if the client leaves."""


class ModelQueue:
    """The queue of one base model, with the picker's forecasts for it."""

    def __init__(self, picker: Picker, model: str, settings: Flow) -> None:
        self._picker = picker
        self.model = model
        self.control: FlowControl[HeldRequest] = FlowControl(settings, self)
        self.unknown_objectives = 0
        """The number of requests with an objective for which no priority is set."""
        self._lost_at = inf
        """Since when no server is ready for the requests that wait."""

    def least_wait_s(self, *, now: float) -> float:
        if (least_s := self._picker.least_wait_s(self.model, now=now)) > 0.0:
            self._lost_at = inf  # some server is ready, though busy
        return least_s

    def forecast(self, payload: HeldRequest, *, left_s: float, now: float) -> Forecast:
        try:
            prompt = payload.prompt if payload.table is self._picker.caches.table else None
            considered = self._picker.consider(payload.question, prompt=prompt, left_s=left_s, now=now)
        except PickError as error:
            self._lost_at = min(self._lost_at, now)
            may_wait_s = server_wait_s(self._picker, payload.question)
            waits = isinstance(error, NotReadyError) and now - self._lost_at < may_wait_s
            # A request that gets an error takes next to nothing of its tenant's share.
            return Forecast(inf if waits else 0.0, 0.0, 1, 0.0, error.with_traceback(None))
        self._lost_at = inf
        return forecast_of(considered)


class Gate:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._objectives: Mapping[str, int] = {}
        """The priorities of the cluster's InferenceObjectives, by name."""
        self._policy: Policy | None = None
        """The policy that the queues follow."""
        self._queues: dict[str, ModelQueue] = {}
        """By base model."""
        self._unserved = Unserved()
        self._draining = False
        self._listens = False
        """Whether the picker's events come here. They do from the first queue on."""

    @property
    def on(self) -> bool:
        """Return whether requests have to be offered to this gate."""
        return self._picker.flow_decides and not self._draining

    @property
    def waiting(self) -> int:
        return len(self._unserved) + sum(len(queue.control) for queue in self._queues.values())

    @property
    def due_at(self) -> float:
        """Return the latest time at which `pump` must be called. Infinity: no request waits."""
        queues = (queue.control.due_at for queue in self._queues.values())
        return min((self._unserved.due_at, *queues))

    def offer(
        self,
        question: Question,
        claim: FlowClaim,
        decided: OnDecided,
        *,
        size_bytes: int,
        longest_s: float,
        now: float,
    ) -> Pick | WaitingRequest | UnservedRequest:
        """Return a pick if the request goes at once, or else the waiting request. Raises PickError if the
        request is refused.
        """
        picker = self._picker
        self._follow_policy(now=now)
        spec = picker.policy.spec.flow
        left_s = claim.ttft_s if claim.ttft_s is not None else spec.deadline_seconds or inf
        try:
            considered = picker.consider(question, left_s=left_s if picker.flow_holds else inf, now=now)
        except NotReadyError as error:
            wait_s = min(server_wait_s(picker, question), longest_s)
            if wait_s <= 0:
                raise
            unserved = UnservedRequest(
                question, decided, size_bytes, now, now + wait_s, error.with_traceback(None)
            )
            self._unserved.hold(unserved, most=spec.in_all)
            return unserved
        if not picker.flow_holds or considered.choice is None:
            return picker.commit(considered, now=now)
        model = picker.fleet.columns.roster.models[considered.slots[0]]
        queue = self._queues.get(model) or self._new_queue(model)
        fate = queue.control.offer(
            HeldRequest(question, considered.prompt, picker.caches.table, queue, decided),
            forecast_of(considered),
            priority=self._priority(spec, claim, question, queue),
            tenant=claim.tenant,
            size_bytes=size_bytes,
            left_s=left_s,
            longest_s=longest_s,
            now=now,
        )
        if isinstance(fate, TenantFlow):
            return picker.commit(considered, priority=fate.band.priority, tenant=fate.tenant, now=now)
        return fate

    def leave(self, waiting: WaitingRequest | UnservedRequest) -> None:
        """Remove a waiting request, because its client is gone."""
        if isinstance(waiting, UnservedRequest):
            self._unserved.leave(waiting)
        else:
            waiting.payload.queue.control.leave(waiting)

    def pump(self, *, now: float) -> None:
        """Decide the requests that can be decided now. One call refuses at most `AT_ONCE` requests, and lets
        as many go at a drain. The next calls decide the rest.
        """
        self._follow_policy(now=now)
        self._unserved.serve(self._picker.pick, now=now)
        ends, left = self._ends, AT_ONCE
        for queue in list(self._queues.values()):
            while left and (decided := queue.control.next(now=now)) is not None:
                self._carry_out(decided, now=now)
                left -= ends or isinstance(decided[1], FlowRefusedError)
        if ends:
            self._queues = {model: queue for model, queue in self._queues.items() if not queue.control.empty}

    def drain(self, *, now: float) -> None:
        """Send all waiting requests in order, and let no request wait any more, because the process ends.
        Some requests go now, and the others with the next calls of `pump`.
        """
        self._draining = True
        self._unserved.give_up(now=now)
        for queue in self._queues.values():
            queue.control.drain()
        self.pump(now=now)

    # -- figures ---------------------------------------------------------------------------------------------

    def unserved(self) -> Collection[str]:
        """Return some models for which requests wait, and for which no server may be starting yet."""
        if not self._picker.policy.spec.flow.wait_for_server_seconds:
            return []
        new = self._unserved.models()
        lost = self._queues.keys() - self._picker.fleet.models - {"", *new}
        return [*new, *(model for model in lost if len(self._queues[model].control))]

    def status(self, *, now: float) -> list[FlowStatus]:
        return [
            queue.control.status(model, unknown_objectives=queue.unknown_objectives, now=now)
            for model, queue in self._queues.items()
        ]

    def set_objectives(self, priorities: Mapping[str, int]) -> None:
        """Set the priorities of the cluster's InferenceObjectives. Waiting requests keep their priorities."""
        self._objectives = priorities

    # -- parts -----------------------------------------------------------------------------------------------

    def _new_queue(self, model: str) -> ModelQueue:
        if not self._listens:
            self._listens = True
            self._picker.subscribe(self._on_event)
        # Models that no server has any more, and for which no request waits, are forgotten.
        waiting = {model for model, queue in self._queues.items() if not queue.control.empty}
        forget_models(self._queues, self._picker.fleet.models | waiting)
        queue = self._queues[model] = ModelQueue(self._picker, model, self._picker.policy.spec.flow)
        return queue

    def _on_event(self, event: PickerEvent) -> None:
        """Learn from a sampled answer how long the answers of a tenant are."""
        if isinstance(event, Ended) and (tokens := event.pick.decision.output_tokens) is not None:
            queue = self._queues.get(event.pick.state.model)
            if queue is not None:
                queue.control.answers.learn(event.pick.decision.tenant, tokens)

    def _priority(self, spec: Flow, claim: FlowClaim, question: Question, queue: ModelQueue) -> int:
        """Return the priority of the request. The first of these that gives a priority counts: the objective
        in the header (by the cluster's list, then by the policy's), the model.
        """
        if claim.objective:
            named = self._objectives.get(claim.objective, spec.objectives.get(claim.objective))
            if named is not None:
                return named
            queue.unknown_objectives += 1
        return spec.models.get(question.inference.model, 0)

    def _carry_out(self, decided: Decided[HeldRequest], *, now: float) -> None:
        item, outcome = decided
        fate = outcome if isinstance(outcome, FlowRefusedError) else outcome.choice
        if not isinstance(fate, PickError):  # nothing has changed since the forecast
            fate = self._picker.commit(
                fate,
                waited_s=now - item.arrived_at,
                priority=item.priority,
                tenant=item.tenant,
                now=now,
            )
        item.payload.decided(fate, now)

    def _follow_policy(self, *, now: float) -> None:
        policy = self._picker.policy
        if policy is self._policy:
            return
        self._policy = policy
        for queue in self._queues.values():
            if self._ends:
                queue.control.drain()
            else:
                queue.control.apply(policy.spec.flow, now=now)

    @property
    def _ends(self) -> bool:
        """Whether all requests that wait should go now."""
        return self._draining or not self._picker.flow_holds


def server_wait_s(picker: Picker, question: Question) -> float:
    """Return how long the request may wait while no server of its model is ready."""
    spec, pools = picker.policy.spec.flow, picker.fleet.served.pools(question.inference.model)
    comes = picker.starting & pools if pools else picker.starting
    return spec.wait_for_server_seconds or (spec.ttl_seconds if comes else 0.0)


def forecast_of(considered: Considered) -> Forecast:
    """Return the forecast for a request at its chosen server."""
    assert considered.choice is not None, "flow control holds only requests whose candidates were scored"
    weighed, place = considered.choice.weighed, considered.choice.places[0]
    wait_s = weighed.seen.undone_tokens.item(place) / weighed.seen.rate.item(place)
    own_s, tokens = float(weighed.first_token_s(place)) - wait_s, int(weighed.uncached_tokens.item(place))
    most = considered.question.inference.max_tokens
    return Forecast(wait_s, own_s, tokens, inf if most is None else float(most), considered)
