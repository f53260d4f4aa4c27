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
from typing import Literal, NamedTuple

from epp.cache_beliefs import Mirrors, Prompt
from epp.config.policy import Policy, PolicySpec
from epp.decision import Decision, Pick, PickRequest
from epp.dry_run import DryRun
from epp.endpoints.backlog import Booking
from epp.endpoints.fleet import Fleet
from epp.endpoints.growth import restarted
from epp.endpoints.learned import Learned
from epp.endpoints.recently_left import Absent
from epp.endpoints.state import EndpointState
from epp.errors import NoEndpointError
from epp.journal import Journal
from epp.prefix_index.hashing import Roots
from epp.prefix_index.secret import HashSecret
from epp.prefix_index.table import PrefixTable
from epp.request.response import ResponseFeedback
from epp.residency import Finding, RoutedQueue
from epp.scheduling.record import decision_of, hurried_decision
from epp.scheduling.schedule import Choice, Scheduler
from epp.scheduling.schedule import Request as Asked
from epp.scheduling.snapshot import Snapshot
from epp.ticket import Ticket, own
from epp.types import Address, Endpoint, EndpointMetrics, EndpointName, InferenceRequest

Outcome = Literal["ended", "aborted", "failed"]

_NO_SECRET = HashSecret()


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

    journal: where to note what others are to be told; None: nobody is told, and whoever gives one drains it.
    routed: where exact mode takes the prompts from that servers began to answer; None: it is off.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        rng: random.Random,
        unix_offset_s: float = 0.0,
        journal: Journal | None = None,
        routed: RoutedQueue | None = None,
        secret: HashSecret = _NO_SECRET,
    ) -> None:
        self._rng = rng
        self._journal = journal
        self._routed = routed
        self._unix_offset_s = unix_offset_s
        self._fleet = Fleet()
        self._absent = Absent()
        self._mirrors = Mirrors(policy.spec, secret=secret)
        self._apply(policy)
        self._dry_run: DryRun | None = None

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
        return self._mirrors.learned(model)

    @property
    def secret(self) -> HashSecret:
        """What chunk hashes are rooted in."""
        return self._mirrors.secret

    def set_secret(self, secret: HashSecret) -> None:
        """Hash by another secret from the next pick on. The table starts anew."""
        self._mirrors.set_secret(secret, self._fleet.states())
        self._absent.clear()
        self._align()

    @property
    def roots(self) -> Roots:
        """For those who may only share with pickers that hash alike."""
        return self._mirrors.roots

    @property
    def table(self) -> PrefixTable:
        """For reading, and for what other pickers say. Another one once chunks are cut or hashed differently."""
        return self._mirrors.table

    @property
    def one_model(self) -> bool:
        """Every endpoint serves the same models, so that a request can be routed without knowing its model."""
        return self._fleet.one_model

    def endpoints(self) -> list[Endpoint]:
        return [s.endpoint for s in self._fleet.states()]

    def set_policy(self, policy: Policy, *, now: float) -> None:  # noqa: ARG002 - one shape for all events
        """Route by another policy from the next pick on. The table is kept, unless chunks are cut differently now."""
        self._apply(policy)
        if not self._mirrors.apply(policy.spec, self._fleet.states()):
            self._absent.clear()
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
            self._mirrors.forget_server(name)
            if not self._absent.leave(before[name], now=now):
                self.table.drop_endpoint(name)
        for name in change.restarted:
            self.table.clear_endpoint(name)
        for name in change.added:
            state = self._state(name)
            same = self._absent.come_back(state.endpoint)
            if same:
                continue  # its share keeps its size until the server says one: nothing may be evicted for a guess
            if same is not None:
                self.table.drop_endpoint(name)
            self._mirrors.add(state)
        self._align()

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
            if self._journal is not None:
                self._journal.append(("restarted", now, state))
        state.observe(metrics, now=now)
        self._mirrors.observe(state, before, metrics, now=now)

    def heard_answer(self, state: EndpointState, *, failed: bool, now: float) -> None:
        """Another picker got an answer from this server, good or bad."""
        self._fleet.failures.answered(state, failed=failed, settings=self._spec.failures, now=now)

    def take_in(self, findings: Sequence[Finding]) -> None:
        """Correct the table by what servers' own events say of their caches."""
        for name in self._mirrors.take_in(findings):
            state = self._fleet.get(name)
            if state is None:
                self._mirrors.forget_server(name)
            else:
                self._mirrors.fit(state)

    @property
    def corrected(self) -> Mapping[str, int]:
        """By exact mode so far: chains that servers were found to hold, entries that they were found not to hold."""
        return self._mirrors.corrected

    def housekeep(self, *, now: float) -> None:
        """Work that no request should wait for: eviction, in bounded portions; a look for answers that do not come."""
        self._fleet.failures.look(now=now)
        self.table.evict(now)
        for name in self._absent.give_up(now=now):
            self.table.drop_endpoint(name)

    def check_integrity(self) -> None:
        """Assert that every part is sound, and that the table has a share for each endpoint and each that is waited for."""
        self._fleet.check_integrity()
        self.table.check_integrity()
        self._absent.check_integrity()
        present = {state.endpoint.name for state in self._fleet.states()}
        assert not present & self._absent.names()
        assert set(self.table.endpoints()) == present | self._absent.names()

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
            prompt = self._mirrors.prompt(
                inference, base_model=snapshot.roster.models[slots[0]], body_bytes=request.body_bytes
            )
        asked = Asked(
            prompt_tokens=prompt.tokens,
            cached_tokens=snapshot.of(self._mirrors.cached_tokens(prompt, fleet.columns.block_tokens)),
            session=request.session,
            beginning=self._mirrors.beginning(prompt),
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
            would_pick = tried.choose(asked_too, as_tried, chosen=snapshot.name(choice.places[0]))
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
        ticket = self._book(
            state,
            decision,
            prompt=prompt,
            inference=inference,
            foretold_s=float(ahead_tokens / snapshot.rate[chosen]),
            now=now,
        )
        if self._journal is not None:
            self._journal.append(("began", now, ticket))
        return ticket

    def least_wait_s(self, model: str, *, now: float) -> float:
        """The least time until a server of this base model begins with what it is sent now: the least B/V. 0 where there is none."""
        try:
            slots = self._fleet.candidates(
                model, subset=None, failures_to_eject=self._spec.scrape.failures_to_eject
            )
        except NoEndpointError:
            return 0.0
        snapshot = self._fleet.snapshot(slots, model=model, adapter="", spec=self._spec, now=now)
        return float((snapshot.undone_tokens / snapshot.rate).min())

    def _pick_hurried(self, request: PickRequest, *, now: float) -> Ticket:
        """The less loaded of two by chance, whatever the rule and the prompt. Nobody is scored."""
        inference, fleet, spec = request.inference, self._fleet, self._spec
        adapter = fleet.adapter(inference.model) if inference.model else ""
        slots = fleet.candidates(
            inference.model, subset=request.subset, failures_to_eject=spec.scrape.failures_to_eject
        )
        failures, most = fleet.failures, spec.max_destinations
        few = [self._fleet.in_slot(slot) for slot in self._rng.sample(slots, min(len(slots), most))]
        few[:2] = sorted(few[:2], key=lambda state: state.load(state.metrics))
        few.sort(key=lambda state: round(failures.share(state, now=now), 1))
        state = few[0]
        prompt = self._mirrors.prompt(
            inference, base_model=state.endpoint.model, body_bytes=request.body_bytes
        )
        decision = hurried_decision(
            request,
            [state.endpoint for state in few],
            prompt_tokens=prompt.tokens,
            adapter=adapter,
            policy=self._policy,
            at_unix_s=now + self._unix_offset_s,
        )
        ticket = self._book(state, decision, prompt=prompt, inference=inference, foretold_s=0.0, now=now)
        if self._journal is not None:
            self._journal.append(("began", now, ticket))
        return ticket

    def on_response_headers(self, pick: Pick, *, status: int, served: Address | None, now: float) -> bool:
        """The answer begins. True if another endpoint than the first choice served it: booking and entry move there."""
        ticket = own(pick)
        if ticket.ended:
            return False
        ticket.responded = True
        ticket.decision.status = status
        # Not the endpoint's address of today: that may have changed since it was answered.
        expected = ticket.decision.served or ticket.destinations[0]
        mismatch = served is not None and served != expected
        self._fleet.failures.began(ticket.wait, now=now)
        if served is not None:
            ticket.decision.served = served
            if mismatch:
                self._failed(ticket, now=now)  # else the data plane would not have turned to another
                self._move(ticket, served, now=now)
        ticket.decision.served_by = ticket.state.endpoint.name
        ticket.decision.headers_s = now + self._unix_offset_s - ticket.decision.at_unix_s
        self._judge(ticket, status, now=now)
        if status >= 400:
            self._forget_prefix(ticket)
        elif self._routed is not None:
            ticket.hand_over(self._routed, self._mirrors.schedule, now=now)
        if not ticket.streams:
            # Headers of an answer that is not streamed come when it is finished; of a streamed one, before it begins.
            ticket.state.computed(ticket.booking, now=now)
        return mismatch

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        """Learn from a sampled answer."""
        ticket = own(pick)
        decision = ticket.decision
        decision.cached_tokens = feedback.cached_tokens
        if feedback.first_token_at is not None:
            decision.ttft_s = feedback.first_token_at + self._unix_offset_s - decision.at_unix_s
        if feedback.prompt_tokens and ticket.prompt.teaches:
            learned = self._mirrors.learned(ticket.state.endpoint.model)
            learned.tokens.learn(ticket.prompt.size, feedback.prompt_tokens)
        conversation = ticket.conversation
        if conversation is None or not feedback.complete or not feedback.text:
            return
        if ticket.prefix_lost or not self._mirrored(ticket):
            return
        chain = self._mirrors.next_turn_chain(ticket.chain, conversation, feedback.text)
        if len(chain) > len(ticket.chain):
            self.table.record(ticket.state.endpoint.name, chain, now=now)
            if self._journal is not None:
                self._journal.append(("grew", now, ticket.state, chain))

    def end(self, pick: Pick, *, outcome: Outcome, now: float) -> None:
        """The HTTP request is over: release the booking; keep the prefix only if its server computed it."""
        ticket = own(pick)
        if ticket.ended:
            return
        ticket.ended = True
        ticket.decision.outcome = outcome
        status = ticket.decision.status
        served = outcome == "ended" and status is not None and status < 400
        ticket.wait.over = True
        if outcome == "failed" and (status is None or status < 400):
            self._failed(ticket, now=now)  # it broke off
        ticket.state.release(ticket.booking, computed=served, now=now)
        if served and ticket.prompt.teaches:
            ticket.state.window.ended(ticket.prompt.size)
        if self._routed is not None:
            ticket.let_go(self._routed)
        if not ticket.responded:
            self._forget_prefix(ticket)
        if not ticket.prefix_lost and self._mirrored(ticket):
            # Servers order their blocks by when they are freed, which is now.
            self.table.touch(ticket.state.endpoint.name, ticket.chain, now=now)
        if self._journal is not None:
            self._journal.append(("over", now, ticket))

    def detach(self, pick: Pick, *, now: float) -> None:
        """The stream is let go on purpose while the answer runs on; scrapes count the request from here on."""
        ticket = own(pick)
        if not ticket.ended:
            ticket.ended = ticket.wait.over = True
            ticket.decision.outcome = "detached"
            if self._routed is not None:
                ticket.let_go(self._routed)
            ticket.state.detach()
            if self._journal is not None:
                self._journal.append(("over", now, ticket))

    # -- parts ---------------------------------------------------------------------------------------------------

    def _apply(self, policy: Policy) -> None:
        self._policy = policy
        self._spec: PolicySpec = policy.spec
        self._scheduler = Scheduler(policy.spec, self._rng)

    def _align(self) -> None:
        """Servers have come or gone: the table's bits mean other slots now."""
        self._mirrors.align(self._fleet.columns.roster.names)

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
        foretold_s: float,
        now: float,
    ) -> Ticket:
        """The chosen endpoint has this to do from now on, and is believed to hold the prompt."""
        cached_tokens = decision.matched_tokens
        booking = self._booked(state, prompt, cached=cached_tokens, adapter=decision.adapter, now=now)
        recorded = self._mirrors.record(state, prompt, cached_tokens=cached_tokens, now=now)
        share = self._spec.sampling.share
        sampled = share > 0 and self._rng.random() < share
        ticket = Ticket(
            decision=decision,
            destinations=decision.destinations,
            sampled=sampled,
            state=state,
            process=state.process,
            booking=booking,
            streams=inference.stream,
            conversation=self._mirrors.remainder(inference, prompt.chain) if sampled else None,
            prompt=prompt,
            recorded=recorded,
            table=self.table,
            wait=self._fleet.failures.sent(
                state,
                streams=inference.stream,
                foretold_s=foretold_s,
                settings=self._spec.failures,
                now=now,
            ),
        )
        if self._routed is not None and prompt.chain:
            ticket.awaited = self._routed.keep(inference)
        return ticket

    def _booked(
        self, state: EndpointState, prompt: Prompt, *, cached: int, adapter: str, now: float
    ) -> Booking:
        booking = Booking(tokens=prompt.tokens - cached, booked_at=now)
        state.book(booking, now=now)
        if adapter:
            booking.loads = state.use_adapter(adapter, spec=self._spec, now=now)
        return booking

    def _failed(self, ticket: Ticket, *, now: float) -> None:
        self._fleet.failures.answered(ticket.state, failed=True, settings=self._spec.failures, now=now)

    def _judge(self, ticket: Ticket, status: int, *, now: float) -> None:
        """What an answer's status says of its server. Other errors than these are the client's."""
        failures, settings, model = self._fleet.failures, self._spec.failures, ticket.decision.model
        if status >= 500 or status == 429:
            self._failed(ticket, now=now)
        elif status == 404:
            failures.refused_model(ticket.state, model, settings=settings, now=now)
        elif status < 400:
            failures.served_model(ticket.state, model, settings=settings, now=now)

    def _mirrored(self, ticket: Ticket) -> bool:
        """Whether the table still holds this ticket's chunks for this very server.

        The server may have been removed, another may have taken its name, or chunks may be cut differently by now.
        """
        state = ticket.state
        same_server = self._fleet.get(state.endpoint.name) is state and state.process == ticket.process
        return bool(ticket.chain) and ticket.table is self.table and same_server

    def _forget_prefix(self, ticket: Ticket) -> None:
        """The server did not compute the prompt: what only this request recorded is taken back."""
        if ticket.recorded is not None and not ticket.prefix_lost and self._mirrored(ticket):
            self.table.undo(ticket.recorded)
        ticket.prefix_lost = True

    def _move(self, ticket: Ticket, served: Address, *, now: float) -> None:
        """Booking and table entry go from the first choice to the endpoint that really served."""
        ticket.state.release(ticket.booking, computed=False, now=now)
        self._forget_prefix(ticket)
        state = self._fleet.at(served)
        if state is None:
            # An endpoint that just left the fleet, or has yet to join it: booked on a state that no pick looks at.
            stranger = Endpoint(
                name=EndpointName(str(served)), address=served, model=ticket.state.endpoint.model
            )
            state = self._fleet.new_state(stranger, spec=self._spec, now=now)
        ticket.state, ticket.process = state, state.process
        cached = 0
        if self._mirrored(ticket):
            block_tokens = self._fleet.columns.block_tokens
            cached = int(self._mirrors.cached_tokens(ticket.prompt, block_tokens)[state.slot])
            ticket.recorded = self.table.record(state.endpoint.name, ticket.chain, now=now)
            ticket.prefix_lost = False
        ticket.booking = self._booked(
            state, ticket.prompt, cached=cached, adapter=ticket.decision.adapter, now=now
        )
        if self._journal is not None:
            self._journal.append(("moved", now, ticket))
