"""The picker: takes in news from all sources, and chooses an endpoint for each request.

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
from epp.decision import DIRECT, Outcome, Pick, PickRequest, Queued, WouldPick
from epp.dry_run import DryRun
from epp.endpoints.failures import Probe, Verdict
from epp.endpoints.fleet import Fleet
from epp.endpoints.growth import restarted
from epp.endpoints.learned import Learned
from epp.endpoints.recently_left import RecentlyLeft
from epp.endpoints.served_models import ModelList
from epp.endpoints.state import EndpointState
from epp.errors import NoEndpointError
from epp.hurried import choose_hurriedly
from epp.picker_events import Hangs, Listener, Listeners, Restarted
from epp.prefix_index.hashing import Roots
from epp.prefix_index.kv_reports import KvReport
from epp.prefix_index.secret import HashSecret
from epp.prefix_index.table import PrefixTable
from epp.request.response import ResponseFeedback
from epp.request.rewriting import Rewrites
from epp.scheduling.schedule import Request as Asked
from epp.scheduling.schedule import Scheduler
from epp.scheduling.snapshot import NO_SERVERS, Floats
from epp.server_caches import Prompt, ServerCaches
from epp.types import (
    Address,
    Endpoint,
    EndpointMetrics,
    EndpointName,
)

_NO_SECRET = HashSecret()


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
        self._listeners = Listeners()
        self.recorders = 0
        """Listeners that record requests.
        While there is one, the header of tenants is read though flow control is off."""
        self._unix_offset_s = unix_offset_s
        self.fleet = Fleet(refuses_unknown_models=refuses_unknown_models)
        """For reading, and for what other pickers say: the state of every endpoint."""
        self.rewrites = Rewrites()
        """Applied by the streams, before a prompt is hashed."""
        self._recently_left = RecentlyLeft()
        self.caches = ServerCaches(policy.spec, secret=secret)
        self._commits = Commits(
            self.fleet, self.caches, self._listeners, policy=policy, rng=rng, unix_offset_s=unix_offset_s
        )
        self._apply(policy)
        self.dry_run: DryRun | None = None
        """The policy that is scored beside, and how often it agreed. For reading."""

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on, in order, and before any other work is done."""
        self._listeners.add(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call it no more. Harmless where it does not listen, and while events are told."""
        self._listeners.remove(listener)

    # -- what the sources say --------------------------------------------------------------------------------

    def learned(self, model: str) -> Learned:
        """For reading: what the servers of a model have taught."""
        return self.caches.learned(model)

    @property
    def secret(self) -> HashSecret:
        """What chunk hashes are rooted in."""
        return self.caches.secret

    def set_secret(self, secret: HashSecret) -> None:
        """Hash by another secret from the next pick on. The table starts anew."""
        self.caches.set_secret(secret, self.fleet.states())
        self._recently_left.clear()
        self._align()

    @property
    def roots(self) -> Roots:
        """For those who may only share with pickers that hash alike."""
        return self.caches.roots

    @property
    def table(self) -> PrefixTable:
        """For reading, and for what other pickers say.
        Another one once chunks are cut or hashed differently.
        """
        return self.caches.table

    @property
    def one_model(self) -> bool:
        """Every endpoint serves the same models, so that a request can be routed without knowing its
        model.
        """
        return self.fleet.one_model and not self.rewrites

    def endpoints(self) -> list[Endpoint]:
        return [s.endpoint for s in self.fleet.states()]

    def set_policy(self, policy: Policy, *, now: float) -> None:  # noqa: ARG002 - one shape for all events
        """Route by another policy from the next pick on.
        The table is kept, unless chunks are cut differently now.
        """
        self._apply(policy)
        self._commits.apply(policy)
        if not self.caches.apply(policy.spec, self.fleet.states()):
            self._recently_left.clear()
            self._align()

    def set_dry_run(self, policy: Policy | None) -> None:
        """Score every pick by `policy` as well, without acting on it; None: stop that."""
        self.dry_run = DryRun(policy) if policy is not None else None

    def set_endpoints(
        self, endpoints: Sequence[Endpoint], *, now: float, pools: AbstractSet[str] = frozenset()
    ) -> None:
        """Follow the source's list of endpoints.
        pools: the InferencePools that exist, with or without endpoints.
        """
        before = {state.endpoint.name: state.endpoint for state in self.fleet.states()}
        change = self.fleet.set_endpoints(endpoints, spec=self._spec, now=now, pools=pools)
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
                # its share keeps its size until the server says one: nothing may be evicted for a guess
                continue
            if same is not None:
                self.table.drop_endpoint(name)
            self.caches.add(state)
        self.caches.forget_models(self.fleet.models)
        self._align()

    def take_lists(self, lists: Mapping[EndpointName, ModelList | None], *, now: float) -> None:
        """What servers list at `/v1/models` from now on; None: it was asked, and does not say."""
        for name in self.fleet.take_lists(lists, spec=self._spec, now=now):
            self.table.clear_endpoint(name)
        for name in lists:
            state = self.fleet.get(name)
            if state is not None:
                self.caches.fit(state)
        self.caches.forget_models(self.fleet.models)

    def set_rewrites(self, rewrites: Rewrites) -> None:
        """Other names for models, from the next request on. They are listed with the servers' own."""
        self.rewrites = rewrites
        self.fleet.set_aliases(rewrites.aliases)

    def model_list(self, subset: frozenset[Address] | None = None) -> bytes | None:
        """The answer to `GET /v1/models`, of the servers at these addresses if some are given.
        None: no server has said.
        """
        return self.fleet.model_list(subset)

    def observe(self, name: EndpointName, metrics: EndpointMetrics | None, *, now: float) -> None:
        """Take in one scrape; None: it failed."""
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
            self.table.clear_endpoint(name)
            before = None
            self._listeners.tell(Restarted(now, state))
        if self.fleet.failures.page(state, before, metrics, settings=self._spec.failures, now=now):
            self._listeners.tell(Hangs(now, state))
        state.observe(metrics, now=now)
        self.caches.observe(state, before, metrics, now=now)

    def heard_answer(self, state: EndpointState, *, failed: bool, now: float) -> None:
        """Another picker got an answer from this server, good or bad."""
        self.fleet.failures.answered(state, failed=failed, settings=self._spec.failures, now=now)

    def heard_hang(self, state: EndpointState, *, now: float) -> None:
        """Requests of another picker hang at this server."""
        self.fleet.failures.hangs(state, now=now)

    def take_in(self, findings: Sequence[KvReport]) -> None:
        """Correct the table by what servers' own events say of their caches."""
        for name in self.caches.take_in(findings):
            state = self.fleet.get(name)
            if state is None:
                self.caches.forget_server(name)
            else:
                self.caches.fit(state)

    @property
    def corrected(self) -> Mapping[str, int]:
        """By exact mode so far: chains that servers were found to hold,
        entries that they were found not to hold.
        """
        return self.caches.corrected

    def left_out(self, *, now: float) -> Mapping[EndpointState, str]:
        """Servers that get only trial requests, and why."""
        return self.fleet.failures.why(list(self.fleet.states()), settings=self._spec.failures, now=now)

    def probes_due(self, *, now: float) -> Sequence[Probe]:
        """Servers that have failed, to be asked for one token."""
        return self.fleet.failures.probes_due(settings=self._spec.failures, now=now)

    def probed(self, probe: Probe, verdict: Verdict, *, now: float) -> None:
        """What came of one of them."""
        self.fleet.failures.probed(probe, verdict, settings=self._spec.failures, now=now)

    def housekeep(self, *, now: float) -> None:
        """Work that no request should wait for: eviction, in bounded portions;
        a look for answers that do not come.
        """
        for state in self.fleet.failures.look(now=now):
            self._listeners.tell(Hangs(now, state))
        self.fleet.housekeep(now=now)
        self.table.evict(now)
        for name in self._recently_left.give_up(now=now):
            self.table.drop_endpoint(name)

    def check_integrity(self) -> None:
        """Assert that every part is sound, and that the table has a share for each endpoint and each that is
        waited for.
        """
        self.fleet.check_integrity()
        self.table.check_integrity()
        self._recently_left.check_integrity()
        present = {state.endpoint.name for state in self.fleet.states()}
        assert not present & self._recently_left.names()
        assert set(self.table.endpoints()) == present | self._recently_left.names()

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
        """What `pick` would choose now.
        Nothing is booked. prompt: as an earlier look at the same request found it.

        Raises NoEndpointError or SaturatedError.
        """
        inference, fleet, spec = request.inference, self.fleet, self._spec
        adapter = fleet.adapter(inference.model) if inference.model else ""
        slots = fleet.candidates(
            inference.model, subset=request.subset, failures_to_eject=spec.scrape.failures_to_eject
        )
        snapshot = fleet.snapshot(slots, model=inference.model, adapter=adapter, spec=spec, now=now)
        if prompt is None:
            prompt = self.caches.prompt(
                inference, base_model=snapshot.roster.models[slots[0]], body_bytes=request.body_bytes
            )
        cached = self.caches.cached_tokens(prompt, fleet.columns.block_tokens)
        asked = Asked(
            prompt_tokens=prompt.tokens,
            cached_tokens=snapshot.of(cached),
            session=request.session,
            beginning=self.caches.beginning(prompt),
            matched=cached is not self.caches.nothing,
            prescribed=snapshot.places_of(request.prescribed) if request.prescribed else None,
        )
        if self.dry_run is not None:
            self.dry_run.follow(self._rng)
        return Considered(
            request, prompt, adapter, snapshot, asked, self._scheduler.schedule(asked, snapshot)
        )

    def commit(self, considered: Considered, *, queued: Queued = DIRECT, now: float) -> Pick:
        """Book and record what was considered at this very moment:
        nothing else may have happened in between.
        """
        # No await since the candidates were looked at, nor anywhere in this module:
        # the state that is scored is the state booked.
        would_pick = (
            None if self.dry_run is None else self._would_pick(self.dry_run, considered, queued, now=now)
        )
        return self._commits.commit(considered, would_pick=would_pick, queued=queued, now=now)

    def _would_pick(self, tried: DryRun, considered: Considered, queued: Queued, *, now: float) -> WouldPick:
        """The choice of the policy in dry run among the same servers."""
        request, _, adapter, snapshot, asked, choice = considered
        as_tried = self.fleet.snapshot(
            snapshot.slots, model=request.inference.model, adapter=adapter, spec=tried.policy.spec, now=now
        )
        asked_too = Asked(asked.prompt_tokens, asked.cached_tokens, asked.session, asked.beginning)
        would_pick = tried.choose(asked_too, as_tried, place=choice.places[0])
        return replace(would_pick, flow=queued.would) if queued.would else would_pick

    def on_response_headers(self, pick: Pick, *, status: int, served: Address | None, now: float) -> bool:
        """The answer begins. True if another endpoint than the first choice served it."""
        return self._commits.on_response_headers(pick, status=status, served=served, now=now)

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        """Learn from a sampled answer."""
        self._commits.on_feedback(pick, feedback, now=now)

    def end(self, pick: Pick, *, outcome: Outcome, now: float) -> None:
        """The HTTP request is over."""
        self._commits.end(pick, outcome=outcome, now=now)

    def detach(self, pick: Pick, *, now: float) -> None:
        """The stream is let go on purpose while the answer runs on;
        scrapes count the request from here on.
        """
        self._commits.detach(pick, now=now)

    def queued(self, model: str, *, now: float) -> tuple[Floats, Floats]:
        """B and V of each server of this base model; empty where there is none."""
        if model not in self.fleet.models:
            return NO_SERVERS, NO_SERVERS  # they are gone, or call themselves otherwise by now
        try:
            slots = self.fleet.candidates(
                model, subset=None, failures_to_eject=self._spec.scrape.failures_to_eject
            )
        except NoEndpointError:
            return NO_SERVERS, NO_SERVERS
        snapshot = self.fleet.snapshot(slots, model=model, adapter="", spec=self._spec, now=now)
        return snapshot.undone_tokens, snapshot.rate

    # -- parts -----------------------------------------------------------------------------------------------

    def _apply(self, policy: Policy) -> None:
        self.policy = policy
        """In force. For reading."""
        self._spec: PolicySpec = policy.spec
        self._scheduler = Scheduler(policy.spec, self._rng)

    def _align(self) -> None:
        """Servers have come or gone: the table's bits mean other slots now."""
        self.caches.align(self.fleet.columns.roster.names)

    def _state(self, name: EndpointName) -> EndpointState:
        state = self.fleet.get(name)
        assert state is not None, "asked for an endpoint that the fleet does not hold"
        return state
