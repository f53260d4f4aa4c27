"""Flow control in front of the picker: a request passes at once, or waits here until it is sent or refused.

Connects `flow`, which knows no servers, with the picker, which knows no queue. The forecast for a request is
the picker's own choice, which is committed in the same turn of the event loop. There is one queue for each
base model, since servers of one model cannot relieve those of another. Synchronous: no task, no clock, no
logger. Whoever owns a timer calls `pump` at `due_at`, and after events that may have freed a server.

Invariant: a request that waits is decided once, by its `Decided`, or leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from typing import Final

from epp.commit import Considered
from epp.config.flow import Flow, Waiting
from epp.config.policy import Policy
from epp.decision import DIRECT, Pick, PickRequest, Queued
from epp.dry_run import DryRun
from epp.endpoints.served_models import forget_models
from epp.errors import FlowRefusedError, PickError
from epp.flow.control import FlowControl
from epp.flow.elsewhere import FlowKey, Row, Telling
from epp.flow.queues import OTHERS, Load
from epp.flow.request import Forecast, Held, LetGo, Pool, RefusedFor, Verdict
from epp.flow.settings import Bound, FlowSettings, Order, WhenLate
from epp.flow.shares import OTHER
from epp.flow.status import FlowStatus, WaitingTenant
from epp.picker import Picker
from epp.server_caches import Prompt

Decided = Callable[[Pick | PickError, float], None]
"""Called once for a request that waited, with its pick or its refusal and the time."""

_RIDES_S: Final = 0.05
"""See `FlowSettings.rides_s`."""
_ORDERS: Mapping[str, Order] = {"Arrival": "arrival", "Deadline": "deadline", "Shortest": "shortest"}
_WHEN_LATE: Mapping[str, WhenLate] = {"Refuse": "refuse", "Demote": "demote"}
_MOST_TENANTS: Final = 32
"""That are shown to people, of all that wait."""
_MESSAGES: Mapping[RefusedFor, str] = {
    "deadline": "the first token would come too late",
    "ttl": "no model server became free in time",
    "full": "too many requests wait",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request's headers say of its place."""

    objective: str = ""
    tenant: str = ""
    path: str = ""
    """Without what follows a question mark; empty where no priority hangs on it."""
    ttft_s: float | None = None

    def within(self, spec: Flow) -> Claim:
        """What of this a policy that is tried would read; the header of its tenants may be another one."""
        return Claim(
            objective=self.objective if "Objective" in spec.claims else "",
            tenant=self.tenant if "Tenant" in spec.claims else "",
            path=self.path,
            ttft_s=self.ttft_s if "Deadline" in spec.claims else None,
        )


NO_CLAIM: Final = Claim()


class Ticket:
    """A request that waits, for `leave`."""

    __slots__ = ("decided", "held", "model", "prompt", "request", "since", "would")

    def __init__(
        self, request: PickRequest, prompt: Prompt, model: str, decided: Decided, *, since: float
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.model = model
        self.decided = decided
        self.since = since
        self.held: Held[Ticket] | None = None
        self.would = ""
        """What the flow control of a policy in dry run would have done with it."""


class Gate:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._telling: dict[str, Telling] = {}
        """By base model."""
        self._tells = False
        """Whether anybody asks for what other pickers are to be told."""
        self._objectives: Mapping[str, int] = {}
        self._policy: Policy | None = None
        self._flows: dict[str, _ModelFlow] = {}
        self._draining = False
        self._tried_with: DryRun | None = None
        self._tried_flows: dict[str, _ModelFlow] = {}
        """Of the policy in dry run, by base model. Nothing waits in them."""

    @property
    def on(self) -> bool:
        """Whether requests have to be offered here. Where they have not, nothing here costs anything."""
        holds = self._picker.policy.spec.flow.mode == "Hold"
        return (holds or self.tried is not None) and not self._draining

    @property
    def _holds(self) -> bool:
        return self._picker.policy.spec.flow.mode == "Hold"

    @property
    def tried(self) -> Flow | None:
        """The flow control of a policy in dry run; None: there is no such policy, or it holds nothing."""
        tried = self._picker.dry_run
        if tried is None or tried.policy.spec.flow.mode == "Direct":
            return None
        return tried.policy.spec.flow

    @property
    def read(self) -> Flow | None:
        """Whose headers are read where the policy in force holds nothing:
        those of a policy in dry run, or for a recording its own.
        """
        return self.tried or (self._picker.policy.spec.flow if self._picker.recorders else None)

    @property
    def waiting(self) -> int:
        return sum(len(flow.control) for flow in self._flows.values())

    @property
    def due_at(self) -> float:
        """When to pump at the latest; inf: nothing waits."""
        return min((flow.control.due_at for flow in self._flows.values()), default=inf)

    def offer(
        self,
        request: PickRequest,
        claim: Claim,
        decided: Decided,
        *,
        size_bytes: int,
        longest_s: float,
        now: float,
    ) -> Pick | Ticket:
        """A pick at once, or a ticket for a request that waits. PickError: it is refused."""
        picker = self._picker
        policy = picker.policy
        if policy is not self._policy:
            self._follow_policy(now=now)
        considered, would = picker.consider(request, now=now), ""
        if picker.dry_run is not None:
            would = self._try(considered, claim, request, size_bytes=size_bytes, longest_s=longest_s, now=now)
        spec = policy.spec.flow
        if spec.mode != "Hold":
            return picker.commit(
                considered, queued=DIRECT._replace(would=would) if would else DIRECT, now=now
            )
        model, ttft_s = considered.base_model, claim.ttft_s
        control = (self._flows.get(model) or self._flow(model)).control
        forecast = _forecast_of(
            considered, left_s=(spec.deadline_seconds or inf) if ttft_s is None else ttft_s
        )
        priority = self._priority(spec, claim, request)
        passed = control.passes(forecast, priority=priority, tenant=claim.tenant, ttft_s=ttft_s, now=now)
        if passed is not None:
            return picker.commit(considered, queued=Queued(0.0, *passed, would), now=now)
        ticket = Ticket(request, considered.prompt, model, decided, since=now)
        ticket.held, verdict = control.offer(
            ticket,
            forecast,
            priority=priority,
            tenant=claim.tenant,
            size_bytes=size_bytes,
            ttft_s=ttft_s,
            longest_s=longest_s,
            now=now,
        )
        ticket.would = would
        if verdict is None:
            return ticket
        assert not isinstance(verdict, LetGo), "it would have passed"
        raise _refusal(verdict.reason, verdict.retry_after_s, waited_s=0.0)

    def leave(self, ticket: Ticket) -> None:
        """The client is gone."""
        flow = self._flows.get(ticket.model)
        if flow is not None and ticket.held is not None:
            flow.control.leave(ticket.held)

    def pump(self, *, now: float) -> None:
        """Decide all that can be decided now."""
        self._follow_policy(now=now)
        for flow in list(self._flows.values()):
            while (verdict := flow.control.next(now=now)) is not None:
                self._carry_out(flow, verdict, now=now)

    def drain(self, *, now: float) -> None:
        """The process ends: all that waits goes now, in order, and nothing waits any more."""
        self._draining = True
        self._let_all_go(now=now)

    # -- other pickers of the same servers -------------------------------------------------------------------

    def tell(self, *, anew: bool = False) -> Sequence[tuple[str, Row]]:
        """What other pickers have not been told, by base model; anew: they know nothing."""
        self._tells = True
        for model in self._flows:
            self._telling.setdefault(model, Telling())
        rows: list[tuple[str, Row]] = []
        for model, telling in self._telling.items():
            flow = self._flows.get(model)
            waiting = flow.control.loads() if flow is not None else {}
            charges = flow.control.take_charges() if flow is not None else {}
            rows += [(model, row) for row in telling.rows(waiting, charges, anew=anew)]
        return rows

    def hear(self, picker: bytes, told: Sequence[tuple[str, Row]], *, anew: bool, now: float) -> None:
        """What another picker told. anew: nothing that it told before counts."""
        if anew:
            self.forget(picker)
        if self._draining or not self._holds:
            return
        by_model: dict[str, list[Row]] = {}
        for model, row in told:
            by_model.setdefault(model, []).append(row)
        served = {state.model for state in self._picker.fleet.states()} if by_model else set()
        for model, rows in by_model.items():
            if model in served:
                self._flow(model).control.hear(picker, rows, now=now)

    def forget(self, picker: bytes) -> None:
        """Another picker is gone."""
        for flow in self._flows.values():
            flow.control.forget(picker)

    # -- figures ---------------------------------------------------------------------------------------------

    def status(self, *, now: float) -> list[FlowStatus]:
        told = []
        for model, flow in self._flows.items():
            waiting = flow.control.waiting()
            told.append(
                FlowStatus(
                    model=model,
                    saturation=flow.control.saturation(now=now),
                    oldest_s=flow.control.oldest_s(now=now),
                    requests={priority: load.requests for priority, load in waiting.items()},
                    tokens={priority: load.tokens for priority, load in waiting.items()},
                    tenants=_longest(flow.control.loads()),
                    let_go_tokens={_readable(t): n for t, n in flow.control.shares.tokens.items()},
                    demoted=flow.control.demoted,
                )
            )
        return told

    def saturation(self, *, now: float) -> float | None:
        """Of the base model with the most of it; None: flow control is off."""
        if not self._holds:
            return None
        return max((flow.control.saturation(now=now) for flow in self._flows.values()), default=0.0)

    def check_integrity(self) -> None:
        for flow in self._flows.values():
            flow.control.check_integrity()

    def set_objectives(self, priorities: Mapping[str, int]) -> None:
        """The InferenceObjectives of the cluster. What waits keeps its priority."""
        self._objectives = priorities

    # -- parts -----------------------------------------------------------------------------------------------

    def _flow(self, model: str) -> _ModelFlow:
        flow = self._flows.get(model)
        if flow is None:
            self._forget_models()
            settings = settings_of(self._picker.policy.spec.flow)
            flow = self._flows[model] = _ModelFlow(self._picker, model, settings)
            if self._tells:
                flow.control.take_charges()  # from now on it counts what others are to be told
        return flow

    def _forget_models(self) -> None:
        """Of models that no server has any more, and for which nothing waits."""
        waiting = {model for model, flow in self._flows.items() if len(flow.control)}
        present = self._picker.fleet.models | waiting
        forget_models(self._flows, present)
        forget_models(self._tried_flows, present)
        forget_models(self._telling, present)

    def _try(
        self,
        considered: Considered,
        claim: Claim,
        request: PickRequest,
        *,
        size_bytes: int,
        longest_s: float,
        now: float,
    ) -> str:
        """What the flow control of a policy in dry run would do,
        with the servers as the policy in force keeps them. Nothing waits there.
        """
        tried, spec = self._picker.dry_run, self.tried
        if tried is None or spec is None:
            return ""
        if tried is not self._tried_with:
            self._tried_with, self._tried_flows = tried, {}
        flow = self._tried_flows.get(considered.base_model)
        if flow is None:
            self._forget_models()
            model = considered.base_model
            flow = self._tried_flows[model] = _ModelFlow(self._picker, model, settings_of(spec))
        claim = claim.within(spec)
        left_s = (spec.deadline_seconds or inf) if claim.ttft_s is None else claim.ttft_s
        demoted = flow.control.demoted
        held, verdict = flow.control.offer(
            Ticket(request, considered.prompt, considered.base_model, _nobody, since=now),
            _forecast_of(considered, left_s=left_s),
            priority=self._priority(spec, claim, request),
            tenant=claim.tenant,
            size_bytes=size_bytes,
            ttft_s=claim.ttft_s,
            longest_s=longest_s,
            now=now,
        )
        flow.control.leave(held)
        if isinstance(verdict, LetGo):
            fate = "go"
        elif verdict is not None:
            fate = f"flow_{verdict.reason}"
        else:
            fate = "demote" if flow.control.demoted > demoted else "wait"
        tried.would_flow(fate)
        return fate

    def _priority(self, spec: Flow, claim: Claim, request: PickRequest) -> int:
        """By the objective that the header names, as the cluster or the policy has it; by model; by path;
        by the body.
        """
        if claim.objective:
            named = self._objectives.get(claim.objective, spec.objectives.get(claim.objective))
            if named is not None:
                return named
        of_model = spec.models.get(request.inference.model)
        if of_model is not None:
            return of_model
        if spec.paths:
            begun = max((path for path in spec.paths if claim.path.startswith(path)), key=len, default=None)
            if begun is not None:
                return spec.paths[begun]
        return -request.inference.priority if "BodyPriority" in spec.claims else 0

    def _carry_out(self, flow: _ModelFlow, verdict: Verdict[Ticket], *, now: float) -> None:
        ticket = verdict.held.payload
        if not isinstance(verdict, LetGo):
            waited_s = now - verdict.held.arrived_at
            ticket.decided(_refusal(verdict.reason, verdict.retry_after_s, waited_s=waited_s), now)
            return
        try:
            queued = _queued(verdict.held, ticket.would, now=now)
            pick = self._picker.commit(flow.considered(ticket, now=now), queued=queued, now=now)
        except PickError as error:
            ticket.decided(error, now)
            return
        ticket.decided(pick, now)

    def _follow_policy(self, *, now: float) -> None:
        policy = self._picker.policy
        if policy is self._policy:
            return
        self._policy = policy
        if self._draining or not self._holds:
            self._let_all_go(now=now)
            return
        settings = settings_of(policy.spec.flow)
        for flow in self._flows.values():
            flow.control.apply(settings, now=now)

    def _let_all_go(self, *, now: float) -> None:
        flows, self._flows = self._flows, {}
        for flow in flows.values():
            flow.control.drain()
            while (verdict := flow.control.next(now=now)) is not None:
                self._carry_out(flow, verdict, now=now)


class _ModelFlow:
    """The queue of one base model, and what the picker foretells for it."""

    def __init__(self, picker: Picker, model: str, settings: FlowSettings) -> None:
        self._picker = picker
        self._model = model
        self._last: tuple[Ticket, Considered] | None = None
        self.control: FlowControl[Ticket] = FlowControl(settings, self)

    def least_wait_s(self, *, now: float) -> float:
        undone_tokens, rate = self._picker.queued(self._model, now=now)
        return float((undone_tokens / rate).min()) if len(rate) else 0.0

    def pool(self, *, now: float) -> Pool:
        undone_tokens, rate = self._picker.queued(self._model, now=now)
        tokens_per_s = float(rate.sum()) or 1.0
        return Pool(len(rate), float(undone_tokens.sum()) / tokens_per_s, tokens_per_s)

    def forecast(self, payload: Ticket, *, now: float) -> Forecast:
        try:
            considered = self._picker.consider(payload.request, prompt=payload.prompt, now=now)
        except PickError:
            return Forecast(0.0, 0.0, 0.0, 1)
        self._last = (payload, considered)
        left_s = payload.held.deadline - now if payload.held is not None else 0.0
        return _forecast_of(considered, left_s=left_s)

    def considered(self, ticket: Ticket, *, now: float) -> Considered:
        """As the forecast by which it was let go a moment ago. PickError: no server can take it any more."""
        last, self._last = self._last, None
        if last is not None and last[0] is ticket:
            return last[1]
        return self._picker.consider(ticket.request, prompt=ticket.prompt, now=now)


def _longest(loads: Mapping[FlowKey, Load]) -> Sequence[WaitingTenant]:
    longest = nlargest(_MOST_TENANTS, loads.items(), key=lambda item: item[1].tokens)
    return [
        WaitingTenant(
            priority=priority,
            tenant=_readable(tenant),
            demoted=late,
            requests=load.requests,
            tokens=load.tokens,
        )
        for (priority, tenant, late), load in longest
    ]


def _readable(tenant: str) -> str:
    """For people: the tenants beyond the limit have a name that no header can carry."""
    return OTHER if tenant == OTHERS else tenant


def settings_of(spec: Flow) -> FlowSettings:
    return FlowSettings(
        headroom_s=spec.headroom_seconds or None,
        rides_s=_RIDES_S,
        order=_ORDERS[spec.order],
        ttft_s=spec.deadline_seconds or inf,
        when_late=_WHEN_LATE[spec.when_late],
        ttl_s=spec.ttl_seconds,
        ttl_by_priority_s={int(priority): ttl_s for priority, ttl_s in spec.ttl_by_priority.items()},
        in_all=_bound(spec.in_all),
        per_priority=_bound(spec.per_priority),
        per_tenant=_bound(spec.per_tenant),
        max_tenants=spec.max_tenants,
        goal_s=spec.goal_seconds,
    )


def _bound(spec: Waiting) -> Bound:
    return Bound(requests=spec.max_requests, size_bytes=spec.max_bytes)


def _forecast_of(considered: Considered, *, left_s: float) -> Forecast:
    """left_s: time to the deadline. Only where the chosen server would miss it are the others looked at."""
    snapshot, choice = considered.snapshot, considered.choice
    place = choice.places[0]
    rate, tokens = snapshot.rate.item(place), choice.uncached_tokens.item(place)
    wait_s, own_s, load_s = snapshot.undone_tokens.item(place) / rate, tokens / rate, choice.load_s
    if load_s is not None:
        own_s += load_s.item(place)
    soonest_s = wait_s + own_s
    if soonest_s > left_s:
        each_s = (snapshot.undone_tokens + choice.uncached_tokens) / snapshot.rate
        soonest_s = float((each_s if load_s is None else each_s + load_s).min())
    return Forecast(wait_s, soonest_s, own_s, int(tokens))


def _nobody(_fate: Pick | PickError, _now: float) -> None:
    """Is never called: no request waits in a dry run."""


def _queued(held: Held[Ticket], would: str, *, now: float) -> Queued:
    return Queued(now - held.arrived_at, held.priority, held.tenant, would)


def _refusal(reason: RefusedFor, retry_after_s: int, *, waited_s: float) -> FlowRefusedError:
    return FlowRefusedError(
        f"{_MESSAGES[reason]}; try again in {retry_after_s} s",
        reason=f"flow_{reason}",
        retry_after_s=retry_after_s,
        waited_s=waited_s,
    )
