"""The picker: chooses an endpoint for each request, by what the sources have said (`fleet_news`).

Owns the rule. `commit` keeps the bookings of chosen requests. Every method is synchronous and runs on one
thread, so nothing else can happen between reading the state and booking a place. Nothing here waits, logs or
reads a clock. `protocol` calls it for requests, the composition root for the policy, and the simulator for
both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from epp.base.errors import NoEndpointError
from epp.base.types import Address
from epp.config.flow import Flow
from epp.config.policy import Policy, PolicySpec
from epp.picker.commit import Commits, Considered
from epp.picker.decision import DIRECT, SHOWN_CHARS, Decision, Outcome, PickRequest, Queued, WouldPick
from epp.picker.dry_run import DryRun
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.events import Fatal, Hangs, MadeState, Pick, StreamEvent
from epp.picker.fatal import FatalRequests
from epp.picker.fleet_news import FleetNews
from epp.picker.hurried import choose_hurriedly
from epp.picker.kept_state import KeptState
from epp.picker.prefix_index.eviction import evict
from epp.picker.prefix_index.secret import HashSecret
from epp.picker.scheduling.candidates import ShownCandidates
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import MOST, Choice, Scheduler, only_ranked
from epp.picker.scheduling.snapshot import Floats, SchedulingRequest, Snapshot
from epp.picker.server_caches import Prompt
from epp.request.response import ResponseFeedback

_NO_SECRET = HashSecret()
_STATE_NAMES = "names of kept state"
"""Stands for a model in the seed of the hashes of ids, which all pickers of a pool have in common."""
_KNOWS_STATE = ("state", "prescribed", "trial")
_LENGTH_MARGIN = 1.125
"""A server whose limit the estimate of a prompt only just meets may still refuse it as too long."""


class Picker(FleetNews):
    """Chooses an endpoint for each request. To receive the picker's events, call `subscribe`."""

    def __init__(
        self,
        policy: Policy,
        *,
        rng: random.Random,
        unix_offset_s: float = 0.0,
        secret: HashSecret = _NO_SECRET,
        refuses_unknown_models: bool = True,
    ) -> None:
        """Start without endpoints. unix_offset_s: converts monotonic times into wall-clock times for people.
        refuses_unknown_models: a request for a model that no server lists gets 404 once all lists are known.
        """
        super().__init__(policy.spec, secret=secret, refuses_unknown_models=refuses_unknown_models)
        self._rng = rng
        self._unix_offset_s = unix_offset_s
        self._commits = Commits(
            self.fleet,
            self.caches,
            self.guesses,
            self._listeners,
            spec=policy.spec,
            rng=rng,
            unix_offset_s=unix_offset_s,
        )
        self.dry_run: DryRun | None = None
        """The policy in dry run, and how often it agreed. Callers only read it."""
        self.kept_state = KeptState()
        """Which server keeps the objects that requests name."""
        self.fatal = FatalRequests()
        """The requests that ended the servers that took them."""
        self.recorders = 0
        """The number of listeners that record requests."""
        self._apply(policy)

    def set_policy(self, policy: Policy, *, now: float) -> None:  # noqa: ARG002 - one shape for all events
        """Use another policy from the next pick on. The table is kept, unless prompts are cut differently
        now.
        """
        self._apply(policy)
        self._commits.apply(policy.spec)
        self.follow_policy(policy.spec)

    def set_dry_run(self, policy: Policy | None) -> None:
        """Score every pick by `policy` too, without acting on the result. None: end the dry run."""
        self.dry_run = DryRun(policy) if policy is not None else None
        self._tell_rules()

    def add_recorders(self, count: int) -> None:
        """Count listeners that record requests. count: negative if they have ended."""
        self.recorders += count
        self._note_flow()

    def housekeep(self, *, now: float) -> None:
        """Do the work of `tidy` and the work that is due now and then, whether requests come or not."""
        self.tidy(now=now)
        self.fleet.housekeep(now=now)
        self.give_up_left(now=now)

    def tidy(self, *, now: float) -> None:
        """Evict in bounded portions, and search for overdue answers. Call this after a pick, so that no
        request waits for this work.
        """
        failures = self.fleet.failures
        if failures.marks or self.fleet.answers.overdue(now=now):
            for state in failures.look(now=now):
                self._listeners.send(Hangs(now, state))
        table = self.caches.table
        if table.overdue(now):
            evict(table, now)

    # -- one request -----------------------------------------------------------------------------------------

    def pick(self, request: PickRequest, *, now: float) -> Pick:
        """Choose, book and record. Raises NoEndpointError or SaturatedError, with nothing booked."""
        if request.hurried:
            return self._pick_hurriedly(request, now=now)
        return self.commit(self.consider(request, now=now), now=now)

    def consider(self, request: PickRequest, *, prompt: Prompt | None = None, now: float) -> Considered:
        """Return the choice that `pick` would make now. Nothing is booked.

        prompt: the prompt from an earlier call for the same request. Raises NoEndpointError or
        SaturatedError.
        """
        inference, fleet, spec = request.inference, self.fleet, self._spec
        adapter = fleet.adapter(inference.model)
        slots = fleet.candidates(inference.model, subset=request.subset)
        if prompt is None:
            base_model = fleet.columns.roster.models[slots[0]]
            name = fleet.sharing_name(inference.model, slots[0])
            prompt = self.caches.prompt(
                inference, base_model=base_model, name=name, body_bytes=request.body_bytes
            )
        slots = fleet.fitting(slots, tokens=_LENGTH_MARGIN * prompt.tokens + (inference.max_tokens or 0))
        snapshot = fleet.snapshot(slots, model=inference.model, adapter=adapter, spec=spec, now=now)
        found = self.caches.table.holders(prompt.chain)
        prefix = prompt.chain[found[0][1] - 1] if found else 0
        holder = self._holder(request, now=now) if request.names_state else None
        asked = SchedulingRequest(
            at=now,
            prompt_tokens=prompt.tokens,
            cached_tokens=self.caches.cached_tokens(prompt, found, fleet.columns.block_tokens)[snapshot.at],
            session=request.session,
            beginning=self.caches.beginning(prompt),
            matched=bool(found),
            prefix=prefix,
            text_bytes=prompt.size.text_bytes,
            caches=self.caches.table.mirrors,
            holder=snapshot.places_by_slot().get(holder.slot) if holder is not None else None,
            prescribed=snapshot.places_of(request.prescribed) if request.prescribed else None,
        )
        if self.dry_run is not None:
            self.dry_run.follow(self._rng)
        return Considered(
            request, prompt, adapter, snapshot, asked, self._scheduler.schedule(asked, snapshot)
        )

    def _pick_hurriedly(self, request: PickRequest, *, now: float) -> Pick:
        inference, most = request.inference, min(self._spec.max_destinations, request.max_destinations)
        few = choose_hurriedly(request, self.fleet, self._rng, most=most, now=now)
        prompt = self.caches.prompt(inference, base_model=few[0].model, body_bytes=request.body_bytes)
        decision = self._decision(
            request,
            prompt,
            self.fleet.adapter(inference.model),
            [state.slot for state in few],
            reason="overload",
            now=now,
        )
        return self._commits.send(few[0], decision, request=request, prompt=prompt, now=now)

    def commit(self, considered: Considered, *, queued: Queued = DIRECT, now: float) -> Pick:
        """Book and record a choice. Nothing may have changed since it was considered."""
        # No code of this module awaits, so the state that was scored is still the state that is booked.
        request, prompt, adapter, snapshot, asked, choice = considered
        first, most = choice.places[0], min(self._spec.max_destinations, request.max_destinations)
        slots = [snapshot.slots[place] for place in choice.places[:most]]
        lost = request.names_state and choice.reason not in _KNOWS_STATE
        reason = "no_state" if lost else choice.reason
        decision = self._decision(request, prompt, adapter, slots, reason=reason, now=now)
        decision.matched_tokens = int(asked.cached_tokens.item(first))
        ahead_tokens = snapshot.undone_tokens.item(first) + choice.uncached_tokens.item(first)
        decision.predicted_s = ahead_tokens / snapshot.rate.item(first)
        decision.candidates = _candidates(choice, snapshot, asked.cached_tokens, spec=self._spec)
        if self.dry_run is not None:
            decision.dry_run = self._would_pick(self.dry_run, considered, now=now)
        if queued is not DIRECT:
            decision.waited_s, decision.priority = queued.waited_s, queued.priority
            decision.tenant = queued.tenant
        return self._commits.commit(considered, decision, now=now)

    def _decision(
        self,
        request: PickRequest,
        prompt: Prompt,
        adapter: str,
        slots: Sequence[int],
        *,
        reason: str,
        now: float,
    ) -> Decision:
        """Return the record of a choice. slots: the destinations, the best first."""
        inference, roster = request.inference, self.fleet.columns.roster
        return Decision(
            request_id=request.request_id,
            at_unix_s=now + self._unix_offset_s,
            kind=inference.kind,
            model=inference.model[:SHOWN_CHARS],
            adapter=adapter,
            rule=self._spec.rule,
            policy=self.policy.metadata.name,
            prompt_tokens=prompt.tokens,
            prompt_chunks=len(prompt.chain),
            reason=reason,
            chosen=roster.names[slots[0]],
            destinations=tuple([roster.addresses[slot] for slot in slots]),
            unread=inference.unread,
        )

    def _would_pick(self, tried: DryRun, considered: Considered, *, now: float) -> WouldPick:
        """Return the choice of the policy in dry run among the same servers."""
        request, _, adapter, snapshot, asked, choice = considered
        as_tried = self.fleet.snapshot(
            snapshot.slots, model=request.inference.model, adapter=adapter, spec=tried.policy.spec, now=now
        )
        asked_too = replace(asked, prescribed=None)
        return tried.choose(asked_too, as_tried, place=choice.places[0])

    def on_response_headers(
        self, pick: Pick, *, status: int, served: Address | None, lost: int = 0, now: float
    ) -> bool:
        """Take in that an answer begins. Return whether another endpoint than the first choice sent it.
        lost: the data plane made the answer itself, because the last of so many servers ended the connection.
        """
        moved = self._commits.on_response_headers(pick, status=status, served=served, now=now)
        if lost and pick.body_hash:
            tried = [state for each in pick.destinations[:lost] if (state := self.fleet.at(each)) is not None]
            strikes = self.fatal.ended(pick.body_hash, tried or [pick.state], tries=lost, now=now)
            self._listeners.send(Fatal(now, pick.body_hash, strikes))
        elif self.fatal.struck and status < 500:
            self.fatal.answered(pick.body_hash)
        return moved

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        self._commits.on_feedback(pick, feedback, now=now)
        if feedback.made:
            made = self._hash_of(feedback.made)
            self.kept_state.remember(made, pick.state.endpoint.name, now=now)
            self._listeners.send(MadeState(now, pick.state, made))

    def end(self, pick: Pick, *, outcome: Outcome, now: float) -> None:
        self._commits.end(pick, outcome=outcome, now=now)

    def detach(self, pick: Pick, *, now: float) -> None:
        """Stop following a request whose stream is let go while the answer continues. Scrapes count the
        request then.
        """
        self._commits.detach(pick, now=now)

    def report(self, event: StreamEvent) -> None:
        """Send an event of a stream to the listeners."""
        self._listeners.send(event)

    def least_wait_s(self, model: str, *, now: float) -> float:
        """Return the least B/V of the servers of a base model. 0: there is no such server."""
        if model not in self.fleet.models:
            return 0.0  # these servers have gone, or list another model now
        try:
            slots = self.fleet.candidates(model, subset=None)
        except NoEndpointError:
            return 0.0
        snapshot = self.fleet.snapshot(slots, model=model, adapter="", spec=self._spec, now=now)
        return float((snapshot.undone_tokens / snapshot.rate).min())

    # -- parts -----------------------------------------------------------------------------------------------

    def _holder(self, request: PickRequest, *, now: float) -> EndpointState | None:
        return self.kept_state.holder(self._hash_of(request.names_state), self.fleet, now=now)

    def _hash_of(self, name: str) -> int:
        seed = self.caches.roots.seed(model=_STATE_NAMES)
        return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), seed) >> 2

    def _apply(self, policy: Policy) -> None:
        self.policy = policy
        """The policy in use. Callers only read it."""
        self._spec: PolicySpec = policy.spec
        self._scheduler = Scheduler(policy.spec, RULES[policy.spec.rule](policy.spec, self._rng))
        self._tell_rules()
        self._note_flow()

    def _tell_rules(self) -> None:
        """Let the rules know of the requests that are sent from now on."""
        tried = (self.dry_run.rule,) if self.dry_run is not None else ()
        self.guesses.rules = (self._scheduler.rule, *tried)

    def _note_flow(self) -> None:
        flow = self._spec.flow
        self.flow_decides = flow.mode == "Hold"
        """Whether requests have to be offered to flow control. If not, flow control costs nothing."""
        self.flow_read: Flow | None = flow if self.flow_decides or self.recorders else None
        """The flow control whose headers are read, for itself or for a recording."""


def _candidates(
    choice: Choice, snapshot: Snapshot, cached_tokens: Floats, *, spec: PolicySpec
) -> ShownCandidates:
    """Return the candidates as people see them. If there are many candidates, only those with the best scores
    are kept.
    """
    best = int(cached_tokens.item(cached_tokens.argmax()))
    if len(snapshot.slots) > MOST:
        choice, snapshot, cached_tokens = only_ranked(choice, snapshot, cached_tokens)
    return ShownCandidates(choice, snapshot, cached_tokens, spec, best)
