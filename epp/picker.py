"""The join: one request in, one endpoint out, and everything that is remembered in between.

Owns the fleet, the prefix table and the rule. Every method is synchronous and runs on one thread, so that between
reading state and booking a place nothing else can happen; nothing here waits, logs or reads a clock. Callers: `extproc` for
requests, the composition root for endpoints, scrapes and policy, the simulator for all of them.

Invariants: every `Pick` that was handed out holds exactly one booking until `end` or `detach`, and those may be
called any number of times, in any order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from epp.config.policy import Policy, PolicySpec
from epp.decision import Decision, Outcome, Phase, Pick, PickRequest
from epp.dry_run import DryRun
from epp.endpoints.backlog import Booking
from epp.endpoints.fleet import Fleet
from epp.endpoints.growth import restarted
from epp.endpoints.learned import Learned
from epp.endpoints.recently_left import RecentlyLeft
from epp.endpoints.served_models import ModelList
from epp.endpoints.state import EndpointState
from epp.errors import NoEndpointError
from epp.picker_events import Answered, Began, Ended, Grew, Hangs, Listener, Moved, PickerEvent, Restarted
from epp.prefilling import Held, Prefilling
from epp.prefix_index.hashing import Roots
from epp.prefix_index.kv_reports import KvReport
from epp.prefix_index.secret import HashSecret
from epp.prefix_index.table import PrefixTable
from epp.request.response import ResponseFeedback
from epp.request.rewriting import Rewrites
from epp.routed_request import RoutedRequest, is_fault, own
from epp.scheduling.record import decision_of, hurried_decision
from epp.scheduling.schedule import Choice, Scheduler
from epp.scheduling.schedule import Request as Asked
from epp.scheduling.snapshot import NO_SERVERS, Floats, Snapshot
from epp.server_caches import Prompt, ServerCaches
from epp.types import (
    PREFILLER,
    RANK,
    RANK_ADDRESS,
    Address,
    Endpoint,
    EndpointMetrics,
    EndpointName,
    InferenceRequest,
)

_NO_SECRET = HashSecret()
_ENDS: Mapping[Outcome, Phase] = {
    "ended": Phase.ENDED,
    "aborted": Phase.ABORTED,
    "failed": Phase.FAILED,
}


class Considered(NamedTuple):
    """One request beside the servers as they are at one moment, and what was chosen."""

    request: PickRequest
    prompt: Prompt
    adapter: str
    snapshot: Snapshot
    asked: Asked
    choice: Choice

    @property
    def base_model(self) -> str:
        """Of the server that was chosen."""
        return self.snapshot.roster.models[self.snapshot.slots[self.choice.places[0]]]


class Picker:
    """See the module's docstring. `unix_offset_s` turns monotonic times into wall time for people to read.

    Whoever wants to know what happens here calls `subscribe`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        rng: random.Random,
        unix_offset_s: float = 0.0,
        secret: HashSecret = _NO_SECRET,
        refuses_unknown_models: bool = True,
    ) -> None:
        """refuses_unknown_models: a model that no server lists is 404, where every server's list is known."""
        self._rng = rng
        self._listeners: tuple[Listener, ...] = ()
        self._unix_offset_s = unix_offset_s
        self._fleet = Fleet(refuses_unknown_models=refuses_unknown_models)
        self.rewrites = Rewrites()
        """Applied by the streams, before a prompt is hashed."""
        self._recently_left = RecentlyLeft()
        self.caches = ServerCaches(policy.spec, secret=secret)
        self._prefilling = Prefilling(self._fleet, self.caches, rng)
        self._apply(policy)
        self._dry_run: DryRun | None = None

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on, in order, and before any other work is done."""
        self._listeners = (*self._listeners, listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call it no more. Harmless where it does not listen, and while events are told."""
        self._listeners = tuple(each for each in self._listeners if each != listener)

    # -- what the sources say ------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def fleet(self) -> Fleet:
        """For reading, and for what other pickers say: the state of every endpoint."""
        return self._fleet

    def learned(self, model: str) -> Learned:
        """For reading: what the servers of a model have taught."""
        return self.caches.learned(model)

    @property
    def secret(self) -> HashSecret:
        """What chunk hashes are rooted in."""
        return self.caches.secret

    def set_secret(self, secret: HashSecret) -> None:
        """Hash by another secret from the next pick on. The table starts anew."""
        self.caches.set_secret(secret, self._fleet.states())
        self._recently_left.clear()
        self._align()

    @property
    def roots(self) -> Roots:
        """For those who may only share with pickers that hash alike."""
        return self.caches.roots

    @property
    def table(self) -> PrefixTable:
        """For reading, and for what other pickers say. Another one once chunks are cut or hashed differently."""
        return self.caches.table

    @property
    def one_model(self) -> bool:
        """Every endpoint serves the same models, so that a request can be routed without knowing its model."""
        return self._fleet.one_model and not self.rewrites

    def endpoints(self) -> list[Endpoint]:
        return [s.endpoint for s in self._fleet.states()]

    def set_policy(self, policy: Policy, *, now: float) -> None:  # noqa: ARG002 - one shape for all events
        """Route by another policy from the next pick on. The table is kept, unless chunks are cut differently now."""
        self._apply(policy)
        if not self.caches.apply(policy.spec, self._fleet.states()):
            self._recently_left.clear()
            self._align()

    @property
    def dry_run(self) -> DryRun | None:
        """The policy that is scored beside, and how often it agreed."""
        return self._dry_run

    def set_dry_run(self, policy: Policy | None) -> None:
        """Score every pick by `policy` as well, without acting on it; None: stop that."""
        self._dry_run = DryRun(policy) if policy is not None else None

    def set_endpoints(self, endpoints: Sequence[Endpoint], *, now: float) -> None:
        """Follow the source's list of endpoints."""
        before = {state.endpoint.name: state.endpoint for state in self._fleet.states()}
        change = self._fleet.set_endpoints(endpoints, spec=self._spec, now=now)
        for name in change.removed:
            self.caches.forget_server(name)
            if not self._recently_left.leave(before[name], now=now):
                self.table.drop_endpoint(name)
        for name in change.restarted:
            self.table.clear_endpoint(name)
        for name in change.added:
            state = self._state(name)
            same = self._recently_left.come_back(state.endpoint)
            if same:
                continue  # its share keeps its size until the server says one: nothing may be evicted for a guess
            if same is not None:
                self.table.drop_endpoint(name)
            self.caches.add(state)
        self.caches.forget_models(self._fleet.models)
        self._align()

    def take_lists(self, lists: Mapping[EndpointName, ModelList], *, now: float) -> None:
        """What servers list at `/v1/models` from now on."""
        for name in self._fleet.take_lists(lists, spec=self._spec, now=now):
            self.table.clear_endpoint(name)
        for name in lists:
            state = self._fleet.get(name)
            if state is not None:
                self.caches.fit(state)
        self.caches.forget_models(self._fleet.models)

    def set_rewrites(self, rewrites: Rewrites) -> None:
        """Other names for models, from the next request on. They are listed with the servers' own."""
        self.rewrites = rewrites
        self._fleet.set_aliases(rewrites.aliases)

    def model_list(self, subset: frozenset[Address] | None = None) -> bytes | None:
        """The answer to `GET /v1/models`, of the servers at these addresses if some are given. None: no server has said."""
        return self._fleet.model_list(subset)

    def observe(self, name: EndpointName, metrics: EndpointMetrics | None, *, now: float) -> None:
        """Take in one scrape; None: it failed."""
        state = self._fleet.get(name)
        if state is None:
            return
        if metrics is None:
            state.scrape_failed(now=now)
            return
        before = state.metrics
        if before is not None and restarted(before, metrics):
            state.forget_server(now=now)
            self._fleet.failures.forget(state)
            self.table.clear_endpoint(name)
            before = None
            self._tell(Restarted(now, state))
        state.observe(metrics, now=now)
        self.caches.observe(state, before, metrics, now=now)

    def heard_answer(self, state: EndpointState, *, failed: bool, now: float) -> None:
        """Another picker got an answer from this server, good or bad."""
        self._fleet.failures.answered(state, failed=failed, settings=self._spec.failures, now=now)

    def heard_hang(self, state: EndpointState, *, now: float) -> None:
        """Requests of another picker hang at this server."""
        self._fleet.failures.hangs(state, now=now)

    def take_in(self, findings: Sequence[KvReport]) -> None:
        """Correct the table by what servers' own events say of their caches."""
        for name in self.caches.take_in(findings):
            state = self._fleet.get(name)
            if state is None:
                self.caches.forget_server(name)
            else:
                self.caches.fit(state)

    @property
    def corrected(self) -> Mapping[str, int]:
        """By exact mode so far: chains that servers were found to hold, entries that they were found not to hold."""
        return self.caches.corrected

    def left_out(self, *, now: float) -> Mapping[EndpointState, str]:
        """Servers that get only trial requests, and why."""
        return self._fleet.failures.why(list(self._fleet.states()), settings=self._spec.failures, now=now)

    def housekeep(self, *, now: float) -> None:
        """Work that no request should wait for: eviction, in bounded portions; a look for answers that do not come."""
        for state in self._fleet.failures.look(now=now):
            self._tell(Hangs(now, state))
        self.table.evict(now)
        for name in self._recently_left.give_up(now=now):
            self.table.drop_endpoint(name)

    def check_integrity(self) -> None:
        """Assert that every part is sound, and that the table has a share for each endpoint and each that is waited for."""
        self._fleet.check_integrity()
        self.table.check_integrity()
        self._recently_left.check_integrity()
        present = {state.endpoint.name for state in self._fleet.states()}
        assert not present & self._recently_left.names()
        assert set(self.table.endpoints()) == present | self._recently_left.names()

    # -- one request ---------------------------------------------------------------------------------------------

    def pick(self, request: PickRequest, *, now: float) -> Pick:
        """Choose, book and record. Raises NoEndpointError or SaturatedError, with nothing booked."""
        if request.hurried:
            return self._pick_hurried(request, now=now)
        return self.commit(self.consider(request, now=now), now=now)

    def consider(self, request: PickRequest, *, prompt: Prompt | None = None, now: float) -> Considered:
        """What `pick` would choose now. Nothing is booked. prompt: as an earlier look at the same request found it.

        Raises NoEndpointError or SaturatedError.
        """
        inference, fleet, spec = request.inference, self._fleet, self._spec
        adapter = fleet.adapter(inference.model) if inference.model else ""
        slots = fleet.candidates(
            inference.model, subset=request.subset, failures_to_eject=spec.scrape.failures_to_eject
        )
        snapshot = fleet.snapshot(slots, model=inference.model, adapter=adapter, spec=spec, now=now)
        if prompt is None:
            prompt = self.caches.prompt(
                inference, base_model=snapshot.roster.models[slots[0]], body_bytes=request.body_bytes
            )
        asked = Asked(
            prompt_tokens=prompt.tokens,
            cached_tokens=snapshot.of(self.caches.cached_tokens(prompt, fleet.columns.block_tokens)),
            session=request.session,
            beginning=self.caches.beginning(prompt),
            prescribed=snapshot.places_of(request.prescribed) if request.prescribed else None,
        )
        if self._dry_run is not None:
            self._dry_run.follow(self._rng)
        return Considered(
            request, prompt, adapter, snapshot, asked, self._scheduler.schedule(asked, snapshot)
        )

    def commit(self, considered: Considered, *, now: float) -> Pick:
        """Book and record what was considered at this very moment: nothing else may have happened in between."""
        request, prompt, adapter, snapshot, asked, choice = considered
        inference, fleet, slots = request.inference, self._fleet, snapshot.slots
        # No await since the candidates were looked at, nor anywhere in this module: the state that is scored is the state booked.
        tried, would_pick = self._dry_run, None
        if tried is not None:
            as_tried = fleet.snapshot(
                slots, model=inference.model, adapter=adapter, spec=tried.policy.spec, now=now
            )
            asked_too = Asked(asked.prompt_tokens, asked.cached_tokens, asked.session, asked.beginning)
            would_pick = tried.choose(asked_too, as_tried, place=choice.places[0])
        decision = decision_of(
            choice,
            snapshot,
            asked,
            request=request,
            prompt_chunks=len(prompt.chain),
            adapter=adapter,
            policy=self._policy,
            would_pick=would_pick,
            at_unix_s=now + self._unix_offset_s,
        )
        chosen = choice.places[0]
        state = fleet.in_slot(slots[chosen])
        if choice.reason == "trial":
            fleet.failures.tried(state, decision.model, now=now)
        ahead_tokens = snapshot.undone_tokens[chosen] + choice.uncached_tokens[chosen]
        decision.predicted_s = float(ahead_tokens / snapshot.rate[chosen])
        if fleet.disaggregated:
            return self._commit_disaggregated(considered, state, decision, now=now)
        decision.asked_model = request.asked_model
        routed = self._book(
            state,
            decision,
            prompt=prompt,
            inference=inference,
            now=now,
        )
        self._tell(Began(now, routed, inference))
        return routed

    def _commit_disaggregated(
        self, considered: Considered, state: EndpointState, decision: Decision, *, now: float
    ) -> Pick:
        """`commit` where some endpoints compute prompts for others."""
        request, prompt, adapter, snapshot, _, choice = considered
        found = self._prefilling.choose(
            request.inference,
            prompt,
            choice,
            snapshot,
            subset=request.subset,
            adapter=adapter,
            spec=self._spec,
            now=now,
        )
        if found is not None:
            decision.prefill = found[1]
            decision.predicted_s = found[1].predicted_s
        decision.asked_model = request.asked_model
        routed = self._book(state, decision, prompt=prompt, inference=request.inference, now=now)
        if found is not None:
            helper, chosen = found
            routed.prefill = self._prefilling.book(
                helper, chosen, prompt, adapter=adapter, spec=self._spec, now=now
            )
            routed.set_headers = (*routed.set_headers, (PREFILLER, chosen.address))
        self._tell(Began(now, routed, request.inference))
        return routed

    def queued(self, model: str, *, now: float) -> tuple[Floats, Floats]:
        """B and V of each server of this base model; empty where there is none."""
        if model not in self._fleet.models:
            return NO_SERVERS, NO_SERVERS  # they are gone, or call themselves otherwise by now
        try:
            slots = self._fleet.candidates(
                model, subset=None, failures_to_eject=self._spec.scrape.failures_to_eject
            )
        except NoEndpointError:
            return NO_SERVERS, NO_SERVERS
        snapshot = self._fleet.snapshot(slots, model=model, adapter="", spec=self._spec, now=now)
        return snapshot.undone_tokens, snapshot.rate

    def _pick_hurried(self, request: PickRequest, *, now: float) -> RoutedRequest:
        """The less loaded of two by chance, whatever the rule and the prompt. Nobody is scored."""
        inference, fleet, spec = request.inference, self._fleet, self._spec
        adapter = fleet.adapter(inference.model) if inference.model else ""
        slots = fleet.candidates(
            inference.model, subset=request.subset, failures_to_eject=spec.scrape.failures_to_eject
        )
        failures, most = fleet.failures, min(spec.max_destinations, request.max_destinations)
        few = [fleet.in_slot(slot) for slot in _some(slots, max(most, 2), self._rng)]
        if len(few) > 1 and few[1].load(few[1].metrics) < few[0].load(few[0].metrics):
            few[0], few[1] = few[1], few[0]
        if failures.known:
            few.sort(key=lambda state: round(failures.share(state, now=now), 1))
        state = few[0]
        prompt = self.caches.prompt(inference, base_model=state.model, body_bytes=request.body_bytes)
        decision = hurried_decision(
            request,
            [each.endpoint for each in few[:most]],
            prompt_tokens=prompt.tokens,
            adapter=adapter,
            policy=self._policy,
            at_unix_s=now + self._unix_offset_s,
        )
        decision.asked_model = request.asked_model
        routed = self._book(state, decision, prompt=prompt, inference=inference, now=now)
        self._tell(Began(now, routed, inference))
        return routed

    def on_response_headers(self, pick: Pick, *, status: int, served: Address | None, now: float) -> bool:
        """The answer begins; later headers of the same answer change nothing.

        True if another endpoint than the first choice served it: booking and table entry move there.
        """
        routed = own(pick)
        if routed.phase is not Phase.SENT:
            return False
        routed.enter(Phase.ANSWERED if status < 400 else Phase.DECLINED)
        routed.decision.status = status
        # Not the endpoint's address of today: that may have changed since the pick was answered.
        mismatch = served is not None and served != routed.destinations[0]
        self._fleet.failures.began(routed.wait, now=now)
        if served is not None:
            routed.decision.served = served
            if mismatch:
                self._failed(routed, now=now)  # else the data plane would not have turned to another
                self._move(routed, served, now=now)
        routed.decision.served_by = routed.state.endpoint.name
        routed.decision.headers_s = now + self._unix_offset_s - routed.decision.at_unix_s
        self._judge(routed, status, now=now)
        if status >= 400:
            self._forget_prefix(routed)
        if routed.prefill is not None:
            self._prefilled(routed, routed.prefill, computed=status < 400, now=now)
        if not routed.streams:
            # Headers of an answer that is not streamed come when it is finished; of a streamed one, before it begins.
            routed.state.computed(routed.booking, now=now)
        self._tell(Answered(now, routed, mismatch))
        return mismatch

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        """Learn from a sampled answer."""
        routed = own(pick)
        decision = routed.decision
        decision.cached_tokens = feedback.cached_tokens
        decision.output_tokens = feedback.completion_tokens
        if feedback.first_token_at is not None:
            decision.ttft_s = feedback.first_token_at + self._unix_offset_s - decision.at_unix_s
        if feedback.prompt_tokens and routed.prompt.teaches:
            learned = self.caches.learned(routed.state.model)
            learned.tokens.learn(routed.prompt.size, feedback.prompt_tokens)
        conversation = routed.conversation
        if conversation is None or not feedback.complete or not feedback.text:
            return
        if routed.prefix_lost or not self._mirrored(routed):
            return
        chain = self.caches.next_turn_chain(routed.chain, conversation, feedback.text)
        if len(chain) > len(routed.chain):
            self.table.record(routed.state.endpoint.name, chain, now=now)
            self._tell(Grew(now, routed.state, chain))

    def end(self, pick: Pick, *, outcome: Outcome, now: float) -> None:
        """The HTTP request is over: release the booking; keep the prefix only if its server computed it."""
        routed = own(pick)
        if routed.over:
            return
        phase = routed.phase
        routed.enter(_ENDS[outcome])
        routed.decision.outcome = outcome
        routed.wait.over = True
        if outcome == "failed" and phase is not Phase.DECLINED:
            self._failed(routed, now=now)  # it broke off
        routed.state.release(routed.booking, computed=routed.computed, now=now)
        if routed.prefill is not None:
            self._prefilling.release(routed.prefill, computed=False, now=now)
        if routed.computed and routed.prompt.teaches:
            routed.state.window.ended(routed.prompt.size)
        if phase is Phase.SENT:
            self._forget_prefix(routed)
        if not routed.prefix_lost and self._mirrored(routed):
            # Servers order their blocks by when they are freed, which is now.
            self.table.touch(routed.state.endpoint.name, routed.chain, now=now)
        self._tell(Ended(now, routed))

    def detach(self, pick: Pick, *, now: float) -> None:
        """The stream is let go on purpose while the answer runs on; scrapes count the request from here on."""
        routed = own(pick)
        if not routed.over:
            routed.enter(Phase.DETACHED)
            routed.wait.over = True
            routed.decision.outcome = "detached"
            routed.state.detach()
            if routed.prefill is not None:
                self._prefilling.detach(routed.prefill)
            self._tell(Ended(now, routed))

    # -- parts ---------------------------------------------------------------------------------------------------

    def _apply(self, policy: Policy) -> None:
        self._policy = policy
        self._spec: PolicySpec = policy.spec
        self._scheduler = Scheduler(policy.spec, self._rng)

    def _tell(self, event: PickerEvent) -> None:
        for listener in self._listeners:
            listener(event)

    def _align(self) -> None:
        """Servers have come or gone: the table's bits mean other slots now."""
        self.caches.align(self._fleet.columns.roster.names)

    def _state(self, name: EndpointName) -> EndpointState:
        state = self._fleet.get(name)
        assert state is not None, "asked for an endpoint that the fleet does not hold"
        return state

    def _book(
        self,
        state: EndpointState,
        decision: Decision,
        *,
        prompt: Prompt,
        inference: InferenceRequest,
        now: float,
    ) -> RoutedRequest:
        """The chosen endpoint has this to do from now on, and is believed to hold the prompt."""
        cached_tokens = decision.matched_tokens
        known_tokens = cached_tokens if decision.prefill is None else prompt.tokens
        booking = self._booked(state, prompt, cached=known_tokens, adapter=decision.adapter, now=now)
        recorded = self.caches.record(state, prompt, cached_tokens=cached_tokens, now=now)
        share = self._spec.sampling.share
        sampled = share > 0 and self._rng.random() < share
        routed = RoutedRequest(
            decision=decision,
            destinations=decision.destinations,
            sampled=sampled,
            state=state,
            process=state.process,
            booking=booking,
            streams=inference.stream,
            conversation=self.caches.remainder(inference, prompt.chain) if sampled else None,
            prompt=prompt,
            recorded=recorded,
            table=self.table,
            wait=self._fleet.failures.sent(
                state,
                streams=inference.stream,
                foretold_s=decision.predicted_s,
                settings=self._spec.failures,
                now=now,
            ),
        )
        if state.endpoint.rank is not None:
            # The headers name one rank, so that no other server could take the request.
            routed.destinations = decision.destinations = decision.destinations[:1]
            routed.set_headers = (
                (RANK_ADDRESS, str(state.endpoint.address)),
                (RANK, str(state.endpoint.rank)),
            )
        return routed

    def _booked(
        self, state: EndpointState, prompt: Prompt, *, cached: int, adapter: str, now: float
    ) -> Booking:
        booking = Booking(tokens=prompt.tokens - cached, booked_at=now)
        state.book(booking, now=now)
        if adapter:
            booking.loads = state.use_adapter(adapter, spec=self._spec, now=now)
        return booking

    def _failed(self, routed: RoutedRequest, *, now: float) -> None:
        self._fleet.failures.answered(routed.state, failed=True, settings=self._spec.failures, now=now)

    def _judge(self, routed: RoutedRequest, status: int, *, now: float) -> None:
        """What an answer's status says of its server. Other errors than these are the client's."""
        failures, settings, model = self._fleet.failures, self._spec.failures, routed.decision.model
        if is_fault(status):
            # Of two servers the one that computed the prompt is suspected: without it, the next answers tell of the other.
            suspect = routed.state if routed.prefill is None else routed.prefill.state
            failures.answered(suspect, failed=True, settings=settings, now=now)
        elif status == 404:
            failures.refused_model(routed.state, model, settings=settings, now=now)
        elif status < 400:
            failures.served_model(routed.state, model, settings=settings, now=now)

    def _prefilled(self, routed: RoutedRequest, held: Held, *, computed: bool, now: float) -> None:
        """The answer begins, so the prefill endpoint has done its part."""
        self._prefilling.release(held, computed=computed, now=now)
        if computed and self._prefilling.holds(held):
            if routed.chain:
                self._tell(Grew(now, held.state, routed.chain))
            if self._fleet.failures.known:
                self._fleet.failures.answered(held.state, failed=False, settings=self._spec.failures, now=now)

    def _mirrored(self, routed: RoutedRequest) -> bool:
        """Whether the table still holds this request's chunks for this very server.

        The server may have been removed, another may have taken its name, or chunks may be cut differently by now.
        """
        state = routed.state
        same_server = self._fleet.get(state.endpoint.name) is state and state.process == routed.process
        return bool(routed.chain) and routed.table is self.table and same_server

    def _forget_prefix(self, routed: RoutedRequest) -> None:
        """The server did not compute the prompt: what only this request recorded is taken back."""
        if routed.recorded is not None and not routed.prefix_lost and self._mirrored(routed):
            self.table.undo(routed.recorded)
        routed.prefix_lost = True

    def _move(self, routed: RoutedRequest, served: Address, *, now: float) -> None:
        """Booking and table entry go from the first choice to the endpoint that really served."""
        routed.state.release(routed.booking, computed=False, now=now)
        self._forget_prefix(routed)
        state = self._fleet.at(served)
        if state is None:
            # An endpoint that just left the fleet, or has yet to join it: booked on a state that no pick looks at.
            stranger = Endpoint(name=EndpointName(str(served)), address=served, model=routed.state.model)
            state = self._fleet.new_state(stranger, spec=self._spec, now=now)
        routed.state, routed.process = state, state.process
        cached = 0
        if self._mirrored(routed):
            block_tokens = self._fleet.columns.block_tokens
            cached = int(self.caches.cached_tokens(routed.prompt, block_tokens)[state.slot])
            routed.recorded = self.table.record(state.endpoint.name, routed.chain, now=now)
            routed.prefix_lost = False
        if routed.prefill is not None:
            cached = routed.prompt.tokens
        routed.booking = self._booked(
            state, routed.prompt, cached=cached, adapter=routed.decision.adapter, now=now
        )
        self._tell(Moved(now, routed))


def _some(slots: Sequence[int], most: int, rng: random.Random) -> list[int]:
    """Two of them by chance and, where more are asked for, those that follow the first. `rng.sample` takes five times as long."""
    n = len(slots)
    first = int(rng.random() * n)
    if n == 1:
        return [slots[0]]
    second = (first + 1 + int(rng.random() * (n - 1))) % n
    others = [at % n for at in range(first + 1, first + min(n, most)) if at % n != second]
    return [slots[first], slots[second], *[slots[at] for at in others[: most - 2]]]
