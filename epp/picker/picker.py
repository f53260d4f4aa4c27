"""The picker: chooses an endpoint for each request, by what the sources have said (`fleet_news`).

Owns the rule, and composes the others: `fleet_news` takes in what the sources say, `commit` keeps the
bookings of chosen requests. Every method is synchronous and runs on one thread, so nothing else can happen
between reading the state and booking a place. Nothing here waits, logs or reads a clock. `protocol` calls it
for requests, the composition root for the policy, and the simulator for both.
"""

import random
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from math import inf

from epp.base.errors import NoEndpointError
from epp.base.types import Address
from epp.config.flow import Flow
from epp.config.policy import Policy, PolicySpec
from epp.picker.commit import Commits, Considered
from epp.picker.decision import SHOWN_CHARS, Candidate, Decision, Question, WouldPick
from epp.picker.dry_run import DryRun
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.events import Fatal, MadeState, Pick
from epp.picker.fleet_news import FleetNews
from epp.picker.guesses import Listeners
from epp.picker.prefix_index.secret import HashSecret
from epp.picker.prefix_index.upkeep import evict
from epp.picker.remembered import FatalRequests, KeptState
from epp.picker.scheduling.candidates import ShownCandidates
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import MOST, Scheduler
from epp.picker.scheduling.snapshot import SchedulingRequest
from epp.picker.server_caches import Prompt
from epp.request.response import ResponseFeedback

_NO_SECRET = HashSecret()
_DECIDED = ("state", "trial")
"""Reasons that stand for themselves, even if no server is known to keep what the request names."""
_LENGTH_MARGIN = 1.125
"""A server whose limit the estimate of a prompt only just meets may still refuse it as too long."""


class Picker:
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
        listeners = Listeners()
        self.subscribe, self.unsubscribe = listeners.subscribe, listeners.unsubscribe
        self.report = listeners.send
        """Sends an event to all listeners. Streams report `Refused` and `ProtocolFault`."""
        self.news = news = FleetNews(
            policy.spec, self.report, secret=secret, refuses_unknown_models=refuses_unknown_models
        )
        """Takes in what the sources say."""
        self.fleet, self.caches, self.guesses = news.fleet, news.caches, news.guesses
        self._rng = rng
        self._unix_offset_s = unix_offset_s
        commits = self._commits = Commits(news, rng=rng)
        self.end, self.detach = commits.end, commits.detach
        self.dry_run: DryRun | None = None
        """The policy in dry run, and how often it agreed. Callers only read it."""
        self.kept_state = KeptState()
        """Which server keeps the objects that requests name."""
        self.fatal = FatalRequests()
        """The requests that ended the servers that took them."""
        self.recorders = 0
        """The number of listeners that record requests. They count themselves."""
        self.starting: AbstractSet[str] = frozenset()
        """The pools in which a server is starting, so that requests may wait for it. The root sets them."""
        self._apply(policy)

    def set_policy(self, policy: Policy) -> None:
        """Use another policy from the next pick on. The table is kept, unless prompts are cut differently
        now.
        """
        self._apply(policy)
        self.news.follow_policy(policy.spec)

    def set_dry_run(self, policy: Policy | None) -> None:
        """Score every pick by `policy` too, without acting on the result. None: end the dry run."""
        self.dry_run = DryRun(policy) if policy is not None else None
        self._tell_rules()

    @property
    def flow_holds(self) -> bool:
        return self._spec.flow.mode == "Hold"

    @property
    def flow_decides(self) -> bool:
        """Whether requests have to be offered to flow control. If not, flow control costs nothing."""
        flow = self._spec.flow
        return flow.mode == "Hold" or flow.wait_for_server_seconds > 0 or bool(self.starting)

    @property
    def flow_read(self) -> Flow | None:
        """The flow control whose headers are read, for itself or for a recording."""
        flow = self._spec.flow
        return flow if flow.mode == "Hold" or self.recorders else None

    def housekeep(self, *, now: float) -> None:
        """Do the work of `tidy` and the work that is due now and then, whether requests come or not."""
        self.tidy(now=now)
        self.news.give_up_left(now=now)

    @property
    def overdue(self) -> bool:
        """Whether entries have to be evicted, or marks of servers that fail have to be looked at."""
        return bool(self.fleet.failures.marks) or self.caches.table.overdue

    def tidy(self, *, now: float) -> None:
        """Do a portion of what is overdue. Call this after a pick, so that no request waits for this work."""
        if self.fleet.failures.marks:
            self.fleet.failures.look(now=now)
        if self.caches.table.overdue:
            evict(self.caches.table)

    # -- one request -----------------------------------------------------------------------------------------

    def pick(self, question: Question, *, waited_s: float = 0.0, now: float) -> Pick:
        """Choose, book and record. Raises NoEndpointError or SaturatedError, with nothing booked."""
        overload = question.overload and question.prescribed is None
        considered = self._in_overload(question, now=now) if overload else self.consider(question, now=now)
        return self.commit(considered, waited_s=waited_s, now=now)

    def consider(
        self, question: Question, *, prompt: Prompt | None = None, left_s: float = inf, now: float
    ) -> Considered:
        """Return the choice that `pick` would make now. Nothing is booked.

        prompt: the prompt from an earlier call for the same question. left_s: the time to the deadline of the
        first token. Raises NoEndpointError or SaturatedError.
        """
        inference, fleet, spec = question.inference, self.fleet, self._spec
        slots, adapter = fleet.candidates(inference.model, subset=question.subset)
        columns = fleet.columns
        if prompt is None:
            base_model = columns.roster.models[slots[0]]
            name = fleet.served.sharing_name(inference.model, slots[0])
            prompt = self.caches.prompt(
                inference, base_model=base_model, name=name, body_bytes=question.body_bytes
            )
        if question.prescribed is not None:
            named = self._prescribed(question.prescribed, slots)
            return Considered(question, prompt, adapter, named, None)
        slots = fleet.served.fitting(
            slots, tokens=_LENGTH_MARGIN * prompt.tokens + (inference.max_tokens or 0)
        )
        snapshot = fleet.snapshot(slots, model=inference.model, adapter=adapter, spec=spec, now=now)
        cached, prefix = self.caches.cached_tokens(prompt, columns.block_tokens)
        holder = self._holder(question, now=now) if question.names_state else None
        request = SchedulingRequest(
            at=now,
            prompt_tokens=prompt.tokens,
            cached_tokens=cached[snapshot.at],
            session=question.session,
            beginning=self.caches.beginning(prompt),
            prefix=prefix,
            text_bytes=prompt.size.text_bytes,
            caches=self.caches.table.mirrors,
            holder=snapshot.place(holder.slot) if holder is not None else None,
            left_s=left_s,
        )
        if self.dry_run is not None:
            self.dry_run.follow(self._rng)
        choice = self._scheduler.schedule(request, snapshot)
        return Considered(
            question, prompt, adapter, [snapshot.slots[place] for place in choice.places], choice
        )

    def _in_overload(self, question: Question, *, now: float) -> Considered:
        """Choose without the time to read the prompt: the less loaded of two random endpoints comes first,
        whatever the rule. The one that keeps what the request names goes before them.
        """
        inference, fleet, failures = question.inference, self.fleet, self.fleet.failures
        slots, adapter = fleet.candidates(inference.model, subset=question.subset)
        most = self._most_destinations(question)
        few = [fleet.states()[slot] for slot in self._rng.sample(slots, min(max(most, 2), len(slots)))]
        few[:2] = sorted(few[:2], key=lambda state: state.loads[0])
        if failures.marks:
            few.sort(key=lambda state: round(failures.share(state, now=now), 1))
        holder = self._holder(question, now=now) if question.names_state else None
        if holder is not None and holder.slot in slots:
            few = [holder, *(state for state in few if state is not holder)]
        prompt = self.caches.prompt(inference, base_model=few[0].model, body_bytes=question.body_bytes)
        return Considered(question, prompt, adapter, [state.slot for state in few], None)

    def commit(
        self,
        considered: Considered,
        *,
        waited_s: float = 0.0,
        priority: int = 0,
        tenant: str = "",
        now: float,
    ) -> Pick:
        """Book and record a choice. Nothing may have changed since it was considered. Flow control says what
        it has done with the request.
        """
        decision = self._decision(considered, now=now)
        decision.waited_s, decision.priority, decision.tenant = waited_s, priority, tenant
        # No code of this module awaits, so the state that was scored is still the state that is booked.
        return self._commits.commit(considered, decision, now=now)

    def _most_destinations(self, question: Question) -> int:
        return min(self._spec.max_destinations, question.max_destinations)

    def _decision(self, considered: Considered, *, now: float) -> Decision:
        """Return the record of a pick."""
        question, prompt, adapter, slots, choice = considered
        inference, roster = question.inference, self.fleet.columns.roster
        matched_tokens, predicted_s = 0, 0.0
        reason = "overload" if question.prescribed is None else "prescribed"
        candidates: Iterable[Candidate] = ()
        would_pick: WouldPick | None = None
        if choice is not None:
            first, weighed = choice.places[0], choice.weighed
            reason = "no_state" if question.names_state and choice.reason not in _DECIDED else choice.reason
            matched_tokens = int(weighed.request.cached_tokens.item(first))
            predicted_s = float(weighed.first_token_s(first))
            cached = weighed.request.cached_tokens
            shown = choice.only_ranked() if len(cached) > MOST else choice
            candidates = ShownCandidates(shown, self._spec, int(cached.item(cached.argmax())))
            if (tried := self.dry_run) is not None:
                spec, among = tried.policy.spec, choice.weighed.seen.slots
                seen = self.fleet.snapshot(among, model=inference.model, adapter=adapter, spec=spec, now=now)
                would_pick = tried.choose(choice.weighed.request, seen, place=first)
        return Decision(
            request_id=question.request_id,
            at_unix_s=now + self._unix_offset_s,
            kind=inference.kind,
            model=inference.model[:SHOWN_CHARS],
            asked_model=question.asked_model,
            adapter=adapter,
            rule=self._spec.rule,
            policy=self.policy.metadata.name,
            prompt_tokens=prompt.tokens,
            prompt_chunks=len(prompt.chain),
            matched_tokens=matched_tokens,
            reason=reason,
            chosen=roster.names[slots[0]],
            destinations=tuple([roster.addresses[n] for n in slots[: self._most_destinations(question)]]),
            candidates=candidates,
            predicted_s=predicted_s,
            unread=inference.unread,
            dry_run=would_pick,
        )

    def on_response_headers(
        self, pick: Pick, *, status: int, served: Address | None, lost: int = 0, now: float
    ) -> None:
        """Take in that an answer begins. served: the endpoint that sent it, as far as the data plane says.
        lost: the data plane made the answer itself, because the last of so many servers ended the connection.
        """
        self._commits.on_response_headers(pick, status=status, served=served, now=now)
        if lost and pick.body_hash:
            tried = [state for each in pick.destinations[:lost] if (state := self.fleet.at(each)) is not None]
            strikes = self.fatal.ended(pick.body_hash, tried or [pick.state], tries=lost, now=now)
            self.report(Fatal(now, pick.body_hash, strikes))
        elif self.fatal.struck and status < 500:
            self.fatal.answered(pick.body_hash)

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        """Take in what the body of a sampled answer showed."""
        self._commits.on_feedback(pick, feedback, now=now)
        if feedback.made:
            self.on_made(pick, feedback.made, now=now)

    def on_made(self, pick: Pick, name: str, *, now: float) -> None:
        """Take in that the server keeps an object with this id, which the answer names."""
        made = self._hash_of(name)
        self.kept_state.remember(made, pick.state.endpoint, at=now)
        self.report(MadeState(now, pick.state, made))

    def least_wait_s(self, model: str, *, now: float) -> float:
        """Return the least B/V of the servers of a base model. 0: there is no such server."""
        if model not in self.fleet.models:
            return 0.0  # these servers have gone, or list another model now
        try:
            slots, _ = self.fleet.candidates(model, subset=None)
        except NoEndpointError:
            return 0.0
        return self.fleet.columns.least_wait_s(slots, now=now)

    # -- parts -----------------------------------------------------------------------------------------------

    def _prescribed(self, prescribed: Sequence[Address], slots: Sequence[int]) -> list[int]:
        """Return those of the slots that a conformance run names, in its order."""
        addresses = self.fleet.columns.roster.addresses
        slot_of = {addresses[slot]: slot for slot in slots}
        named = [slot_of[each] for each in dict.fromkeys(prescribed) if each in slot_of]
        if not named:
            raise NoEndpointError("none of the prescribed endpoints exists", reason="subset_empty")
        return named

    def _holder(self, question: Question, *, now: float) -> EndpointState | None:
        return self.kept_state.holder(self._hash_of(question.names_state), self.fleet, now=now)

    def _hash_of(self, name: str) -> int:
        """Return the hash of an id, which all pickers of a pool have in common, whatever their policies."""
        keyed = blake2b(name.encode("utf-8", "surrogatepass"), key=self.caches.secret.key, digest_size=8)
        return int.from_bytes(keyed.digest(), "little") >> 2

    def _apply(self, policy: Policy) -> None:
        self.policy = policy
        """The policy in use. Callers only read it."""
        self._spec: PolicySpec = policy.spec
        self._scheduler = Scheduler(policy.spec, RULES[policy.spec.rule](policy.spec, self._rng))
        self._tell_rules()

    def _tell_rules(self) -> None:
        """Let the rules know of the requests that are sent from now on."""
        tried = (self.dry_run.rule,) if self.dry_run is not None else ()
        self.guesses.rules = (self._scheduler.rule, *tried)
