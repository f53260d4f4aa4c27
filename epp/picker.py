"""The picker: takes in information from all sources, and chooses an endpoint for each request.

Owns the fleet, the prefix table and the rule. `commit` keeps the bookings of chosen requests. Every method is
synchronous and runs on one thread, so nothing else can happen between reading the state and booking a place.
Nothing here waits, logs or reads a clock. Callers: `extproc` for requests, the composition root for
endpoints, scrapes and policy, the simulator for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from epp.commit import Commits, Considered
from epp.config.policy import Policy, PolicySpec
from epp.decision import DIRECT, Outcome, PickRequest, Queued, WouldPick
from epp.dry_run import DryRun
from epp.endpoints import pages
from epp.endpoints.fleet import Fleet
from epp.endpoints.growth import restarted
from epp.endpoints.learned import Learned
from epp.endpoints.marks import Probe, Verdict
from epp.endpoints.recently_left import RecentlyLeft
from epp.endpoints.state import EndpointState
from epp.errors import NoEndpointError
from epp.hurried import choose_hurriedly
from epp.picker_events import Cut, Hangs, Listener, Listeners, Pick, Restarted
from epp.prefix_index.eviction import evict
from epp.prefix_index.hashing import Roots
from epp.prefix_index.integrity import check_integrity
from epp.prefix_index.kv_reports import KvReport
from epp.prefix_index.removal import clear_endpoint, drop_endpoint
from epp.prefix_index.secret import HashSecret
from epp.prefix_index.table import PrefixTable
from epp.request.response import ResponseFeedback
from epp.request.rewriting import Rewrites
from epp.scheduling.rules import RULES
from epp.scheduling.schedule import Scheduler
from epp.scheduling.snapshot import NO_SERVERS, Floats, SchedulingRequest
from epp.server_caches import Prompt, ServerCaches
from epp.types import Address, Endpoint, EndpointMetrics, EndpointName, ModelList

_NO_SECRET = HashSecret()


class Picker:
    """See the module's docstring. `unix_offset_s` converts monotonic times into wall-clock times for people.

    To receive the picker's events, call `subscribe`.
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
        """refuses_unknown_models: a model that no server lists is a 404, if every server's list is known."""
        self._rng = rng
        self._listeners = Listeners()
        self.recorders = 0
        """Listeners that record requests. While there is one, the header of tenants is read even if flow
        control is off."""
        self._unix_offset_s = unix_offset_s
        self.fleet = Fleet(policy.spec, refuses_unknown_models=refuses_unknown_models)
        """The state of every endpoint. For reading, and for other pickers' events."""
        self.rewrites: Rewrites | None = None
        """The streams apply them before a prompt is hashed. None: there are none."""
        self._recently_left = RecentlyLeft()
        self.caches = ServerCaches(policy.spec, secret=secret)
        self._commits = Commits(
            self.fleet, self.caches, self._listeners, policy=policy, rng=rng, unix_offset_s=unix_offset_s
        )
        self._apply(policy)
        self.dry_run: DryRun | None = None
        """The policy in dry run, and how often it agreed. For reading."""

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every later event, in order, before any other work is done."""
        self._listeners.add(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling `listener`. Harmless if it is not subscribed, and while events are sent."""
        self._listeners.remove(listener)

    # -- what the sources say --------------------------------------------------------------------------------

    def learned(self, model: str) -> Learned:
        """Return what was learned from the servers of a model. For reading."""
        return self.caches.learned(model)

    @property
    def secret(self) -> HashSecret:
        return self.caches.secret

    def set_secret(self, secret: HashSecret) -> None:
        """Use another secret for hashes from the next pick on. The table starts empty."""
        self.caches.set_secret(secret, self.fleet.states())
        self._recently_left.clear()
        self._align()

    @property
    def roots(self) -> Roots:
        """The seeds of hashes, for those who may share only with pickers that hash in the same way."""
        return self.caches.roots

    @property
    def table(self) -> PrefixTable:
        """The prefix table, for reading and for other pickers' events. It is replaced if prompts are cut or
        hashed differently.
        """
        return self.caches.table

    @property
    def one_model(self) -> bool:
        """Whether every endpoint serves the same models. A request can then be routed without knowing its
        model.
        """
        return self.fleet.one_model and self.rewrites is None

    def endpoints(self) -> list[Endpoint]:
        return [s.endpoint for s in self.fleet.states()]

    def set_policy(self, policy: Policy, *, now: float) -> None:  # noqa: ARG002 - one shape for all events
        """Use another policy from the next pick on. The table is kept, unless prompts are cut differently
        now.
        """
        self._apply(policy)
        self._commits.apply(policy)
        if not self.caches.apply(policy.spec, self.fleet.states()):
            self._recently_left.clear()
            self._align()

    def set_dry_run(self, policy: Policy | None) -> None:
        """Score every pick by `policy` too, without acting on it. None: stop this."""
        self.dry_run = DryRun(policy) if policy is not None else None

    def set_endpoints(
        self, endpoints: Sequence[Endpoint], *, now: float, pools: AbstractSet[str] = frozenset()
    ) -> None:
        """Follow the source's list of endpoints.
        pools: the InferencePools that exist, with or without endpoints.
        """
        before = {state.endpoint.name: state.endpoint for state in self.fleet.states()}
        change = self.fleet.set_endpoints(endpoints, now=now, pools=pools)
        for name in change.removed:
            self.caches.reported.forget_server(name)
            if not self._recently_left.leave(before[name], now=now):
                drop_endpoint(self.table, name)
        for name in change.restarted:
            clear_endpoint(self.table, name)
        for name in change.added:
            state = self._state(name)
            same = self._recently_left.come_back(state.endpoint)
            if same:
                # Its mirror keeps its size until the server states one, because a guess must not evict
                # anything.
                continue
            if same is not None:
                drop_endpoint(self.table, name)
            self.caches.add(state)
        self.caches.forget_models(self.fleet.models)
        self._align()

    def take_lists(self, lists: Mapping[EndpointName, ModelList | None], *, now: float) -> None:
        """Take in the servers' lists at `/v1/models`. None: the server was asked, but did not list its
        models.
        """
        for name in self.fleet.take_lists(lists, now=now):
            clear_endpoint(self.table, name)
        for name in lists:
            state = self.fleet.get(name)
            if state is not None:
                self.caches.fit(state)
        self.caches.forget_models(self.fleet.models)

    def set_rewrites(self, rewrites: Rewrites) -> None:
        """Set the other names for models, from the next request on. They are listed with the servers' own
        names.
        """
        self.rewrites = rewrites or None
        self.fleet.set_aliases(rewrites.aliases)

    def model_list(self, subset: frozenset[Address] | None = None) -> bytes | None:
        """Return the answer to `GET /v1/models`; with addresses, for the servers at these addresses only.
        None: no server has listed its models.
        """
        return self.fleet.model_list(subset)

    def observe(self, name: EndpointName, metrics: EndpointMetrics | None, *, now: float) -> None:
        """Take in one scrape. None: the scrape failed."""
        state = self.fleet.get(name)
        if state is None:
            return
        if metrics is None:
            state.scrape_failed(now=now)
            return
        before = state.metrics
        if before is not None and restarted(before, metrics):
            state.forget_server(now=now)
            self.fleet.failures.forget(state)
            clear_endpoint(self.table, name)
            before = None
            self._listeners.send(Restarted(now, state))
        if self.fleet.failures.page(state, before, metrics, now=now):
            self._listeners.send(Hangs(now, state))
        pages.take_in(state, metrics, now=now)
        self.caches.observe(state, before, metrics, now=now)

    def on_peer_answer(self, state: EndpointState, *, failed: bool, now: float) -> None:
        """Another picker got an answer from this server, good or bad."""
        if not failed:
            self.fleet.failures.ended(state, now=now)
        self.fleet.failures.answered(state, failed=failed, now=now)

    def on_peer_hang(self, state: EndpointState, *, now: float) -> None:
        self.fleet.failures.hangs(state, now=now)

    def answer_cut(self, served: Address, *, now: float) -> bool:
        """An answer that this endpoint began well broke off midway. False: no endpoint has this address, or
        several ranks share the address, and any of them may have served the answer.
        """
        state = self.fleet.at(served)
        if state is None or state.endpoint.rank is not None:
            return False
        self.on_cut(state, now=now)
        self._listeners.send(Cut(now, state))
        return True

    def on_cut(self, state: EndpointState, *, now: float) -> None:
        """Called when a server cut an answer midway, as reported to this picker or to another one."""
        self.fleet.failures.answer_cut(state, now=now)

    def take_in(self, findings: Sequence[KvReport]) -> None:
        """Correct the table by the servers' own events about their caches."""
        for name in self.caches.reported.take_in(findings, self.table):
            state = self.fleet.get(name)
            if state is None:
                self.caches.reported.forget_server(name)
            else:
                self.caches.fit(state)

    @property
    def corrected(self) -> Mapping[str, int]:
        """Corrections by exact mode so far: chains added because servers hold them, and entries removed
        because servers do not.
        """
        return self.caches.reported.corrected

    def left_out(self, *, now: float) -> Mapping[EndpointState, str]:
        """Return servers that get only trial requests, and why."""
        return self.fleet.failures.why(list(self.fleet.states()), now=now)

    def probes_due(self, *, now: float) -> Sequence[Probe]:
        """Return the probes to send now: requests of one token to servers that have failed."""
        return self.fleet.failures.probes_due(now=now)

    def probed(self, probe: Probe, verdict: Verdict, *, now: float) -> None:
        self.fleet.failures.probed(probe, verdict, now=now)

    def housekeep(self, *, now: float) -> None:
        """Do the work of `tidy`, and what is due now and then, whether requests come or not."""
        self.tidy(now=now)
        self.fleet.housekeep(now=now)
        for name in self._recently_left.give_up(now=now):
            drop_endpoint(self.table, name)

    def tidy(self, *, now: float) -> None:
        """Work after a pick for which no request should wait: eviction in bounded portions, and a search for
        overdue answers.
        """
        for state in self.fleet.failures.look(now=now):
            self._listeners.send(Hangs(now, state))
        table = self.table
        if table.overdue(now):
            evict(table, now)

    def check_integrity(self) -> None:
        """Assert that every part is valid, and that the table has a mirror for each endpoint and for each one
        that may come back.
        """
        self.fleet.check_integrity()
        check_integrity(self.table)
        self._recently_left.check_integrity()
        present = {state.endpoint.name for state in self.fleet.states()}
        assert not present & self._recently_left.names()
        assert set(self.table.mirrors) == present | self._recently_left.names()

    # -- one request -----------------------------------------------------------------------------------------

    def pick(self, request: PickRequest, *, now: float) -> Pick:
        """Choose, book and record. Raises NoEndpointError or SaturatedError, with nothing booked."""
        if request.hurried:
            state, decision, prompt = choose_hurriedly(
                request,
                self.fleet,
                self.caches,
                self._rng,
                policy=self.policy,
                at_unix_s=now + self._unix_offset_s,
                now=now,
            )
            return self._commits.send(state, decision, request=request, prompt=prompt, now=now)
        return self.commit(self.consider(request, now=now), now=now)

    def consider(self, request: PickRequest, *, prompt: Prompt | None = None, now: float) -> Considered:
        """Return the choice that `pick` would make now. Nothing is booked.

        prompt: the prompt that an earlier call made for the same request. Raises NoEndpointError or
        SaturatedError.
        """
        inference, fleet, spec = request.inference, self.fleet, self._spec
        adapter = fleet.adapter(inference.model) if inference.model else ""
        slots = fleet.candidates(inference.model, subset=request.subset)
        snapshot = fleet.snapshot(slots, model=inference.model, adapter=adapter, spec=spec, now=now)
        if prompt is None:
            prompt = self.caches.prompt(
                inference, base_model=snapshot.roster.models[slots[0]], body_bytes=request.body_bytes
            )
        found = self.caches.table.holders(prompt.chain)
        prefix = prompt.chain[found[0][1] - 1] if found else 0
        asked = SchedulingRequest(
            prompt_tokens=prompt.tokens,
            cached_tokens=self.caches.cached_tokens(prompt, found, fleet.columns.block_tokens)[snapshot.at],
            session=request.session,
            beginning=self.caches.beginning(prompt),
            matched=bool(found),
            prefix=prefix,
            earlier=self.caches.demand.earlier(prefix, now=now) if found else None,
            at_once=self.caches.at_once.expected(prompt.whole, now=now),
            prescribed=snapshot.places_of(request.prescribed) if request.prescribed else None,
        )
        if self.dry_run is not None:
            self.dry_run.follow(self._rng)
        return Considered(
            request, prompt, adapter, snapshot, asked, self._scheduler.schedule(asked, snapshot)
        )

    def commit(self, considered: Considered, *, queued: Queued = DIRECT, now: float) -> Pick:
        """Book and record a choice. Nothing may have changed since it was considered."""
        # There was no await since the candidates were considered, nor is there one in this module. So the
        # scored state is the state that is booked.
        would_pick = (
            None if self.dry_run is None else self._would_pick(self.dry_run, considered, queued, now=now)
        )
        return self._commits.commit(considered, would_pick=would_pick, queued=queued, now=now)

    def _would_pick(self, tried: DryRun, considered: Considered, queued: Queued, *, now: float) -> WouldPick:
        """Return the choice of the policy in dry run among the same servers."""
        request, _, adapter, snapshot, asked, choice = considered
        as_tried = self.fleet.snapshot(
            snapshot.slots, model=request.inference.model, adapter=adapter, spec=tried.policy.spec, now=now
        )
        asked_too = replace(asked, prescribed=None)
        would_pick = tried.choose(asked_too, as_tried, place=choice.places[0])
        return replace(would_pick, flow=queued.would) if queued.would else would_pick

    def on_response_headers(self, pick: Pick, *, status: int, served: Address | None, now: float) -> bool:
        """Called when the answer begins. Returns whether another endpoint than the first choice sent it."""
        return self._commits.on_response_headers(pick, status=status, served=served, now=now)

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        self._commits.on_feedback(pick, feedback, now=now)

    def end(self, pick: Pick, *, outcome: Outcome, now: float) -> None:
        self._commits.end(pick, outcome=outcome, now=now)

    def detach(self, pick: Pick, *, now: float) -> None:
        """Called when the stream is let go while the answer continues. Scrapes count the request then."""
        self._commits.detach(pick, now=now)

    def queued(self, model: str, *, now: float) -> tuple[Floats, Floats]:
        """Return the B and V of each server of this base model. Empty: there is no such server."""
        if model not in self.fleet.models:
            return NO_SERVERS, NO_SERVERS  # these servers have gone, or list another model now
        try:
            slots = self.fleet.candidates(model, subset=None)
        except NoEndpointError:
            return NO_SERVERS, NO_SERVERS
        snapshot = self.fleet.snapshot(slots, model=model, adapter="", spec=self._spec, now=now)
        return snapshot.undone_tokens, snapshot.rate

    # -- parts -----------------------------------------------------------------------------------------------

    def _apply(self, policy: Policy) -> None:
        self.policy = policy
        """The policy in use. For reading."""
        self._spec: PolicySpec = policy.spec
        self.fleet.apply(policy.spec)
        self._scheduler = Scheduler(policy.spec, RULES[policy.spec.rule](policy.spec, self._rng))

    def _align(self) -> None:
        """Servers have come or gone, so the table's bits stand for other slots now."""
        self.caches.align(self.fleet.columns.roster.names)

    def _state(self, name: EndpointName) -> EndpointState:
        state = self.fleet.get(name)
        assert state is not None, "asked for an endpoint that the fleet does not hold"
        return state
