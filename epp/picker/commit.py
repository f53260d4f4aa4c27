"""Follows a request from its choice to its end: books its work, and keeps the bookings right until the
request has ended.

`commit` books the work, records the prompt in the prefix table and sends one event to all listeners, in the
same turn of the event loop in which the server was chosen. The response and the end of the request arrive
here too. They move, undo or release the booking. All methods are synchronous. The picker owns this object and
is its only caller.

Invariant: every `Pick` that was handed out holds exactly one booking until `end` or `detach`. Both may be
called any number of times, in any order.
"""

import random
from typing import Final, NamedTuple, get_args

from msgspec.structs import replace

from epp.base.types import RANK, RANK_ADDRESS, Address, ApiKind, Endpoint, EndpointName
from epp.picker.decision import Decision, Outcome, Question
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.marks import Form, Proof, is_fault
from epp.picker.endpoints.prefill_rate import MOST_SLOWNESS
from epp.picker.events import BEGUN, FOLLOWS, OVER, Answered, Began, Ended, Moved, Phase, Pick, PrefillBegan
from epp.picker.fleet_news import FleetNews
from epp.picker.prefilling import Prefilling
from epp.picker.scheduling.schedule import Choice
from epp.picker.scheduling.snapshot import SentPick
from epp.picker.server_caches import Prompt
from epp.request.response import NO_CONTENT, PARTIAL, ResponseFeedback

_ENDS: Final = {outcome: Phase[outcome.upper()] for outcome in get_args(Outcome)}
_WITHOUT_TOKENS: Final = (ApiKind.EMBEDDINGS, ApiKind.QUERY, ApiKind.OTHER)


def enter(pick: Pick, phase: Phase) -> None:
    """Enter the next phase. An assertion fails if this phase may not follow the current one."""
    assert phase in FOLLOWS[pick.phase], f"{phase} does not follow {pick.phase}"
    pick.phase = phase


def outcome_of(pick: Pick) -> Outcome:
    """Return how the HTTP request ends, if it ends now."""
    if pick.phase not in BEGUN:
        return "aborted"
    if (pick.decision.status or 0) >= 500:
        return "failed"
    return "aborted" if pick.phase is Phase.READING else "ended"


class Considered(NamedTuple):
    """A question with the choice that answers it at one moment."""

    question: Question
    prompt: Prompt
    adapter: str
    slots: list[int]
    """The slots of the destinations, the best first."""
    choice: Choice | None
    """None: there was no time to score candidates, or a conformance run has named the servers."""


class Commits:
    """Books chosen requests and follows them to their ends."""

    def __init__(self, news: FleetNews, *, rng: random.Random) -> None:
        self._fleet, self._caches, self._guesses = news.fleet, news.caches, news.guesses
        self._send = news.send
        self._rng = rng
        self._prefilling = Prefilling(news, rng)

    # -- the choice ------------------------------------------------------------------------------------------

    def commit(self, considered: Considered, decision: Decision, *, now: float) -> Pick:
        """Book and record a choice, and send the event to the listeners. decision: the record of this choice.
        Nothing may have changed since the choice was considered.
        """
        question, prompt, adapter, slots, choice = considered
        state, helper, prefix, beginning = self._fleet.states()[slots[0]], None, 0, 0
        if choice is not None:
            prefix, beginning = choice.weighed.request.prefix, choice.weighed.request.beginning
            if choice.reason == "trial":
                self._fleet.failures.tried(state, decision.model, now=now)
            if self._fleet.prefilling:
                helper = self._prefilling.choose(question, prompt, choice, adapter=adapter, now=now)
        sent = SentPick(state.endpoint.name, now, prefix, question.session, beginning)
        for rule in self._guesses.rules:
            rule.committed(sent)
        if helper is not None:
            decision.prefill, decision.predicted_s = helper[1], helper[1].predicted_s
        pick = self._book(considered, state, decision, sent, now=now)
        if helper is not None:
            self._prefilling.book(pick, helper, now=now)
        self._send(Began(now, pick, question))
        if pick.prefill is not None:
            self._send(PrefillBegan(now, pick.prefill))
        return pick

    # -- the answer, from its headers to its end -------------------------------------------------------------

    def on_response_headers(self, pick: Pick, *, status: int, served: Address | None, now: float) -> None:
        """Take in the beginning of the answer. If another endpoint than the first choice serves the request,
        booking and table entry move to that endpoint. Later headers of the same answer change nothing.
        """
        if pick.phase is not Phase.SENT:
            return
        enter(pick, Phase.ANSWERED)
        pick.decision.status = status
        pick.failed = status >= 300 and pick.prefill is None and is_fault(status)
        # The address of the pick is compared, because the endpoint's current address may have changed since
        # then.
        mismatch = served is not None and served != pick.destinations[0]
        if served is not None:
            pick.decision.served = served
            if mismatch:
                # The data plane tried another server only because the first choice failed.
                self._failed(pick, now=now)
                self._move(pick, served, now=now)
        self._fleet.answers.began(pick.wait, well=status < 300, now=now)
        pick.decision.served_by = pick.state.endpoint.name
        pick.decision.headers_s = now - pick.sent.at
        self._judge(pick, status, now=now)
        if status < 300:
            self._guesses.answered(pick, now=now)
        if pick.prefill is not None:
            self._prefilling.over(pick.prefill, status=status, now=now)
        if not pick.streams:
            # If an answer is not streamed, its headers come when it is finished. The headers of a streamed
            # answer come before it begins.
            pick.state.answered(pick.guess.booking, computed=status < 300 and pick.asks, now=now)
        self._send(Answered(now, pick, mismatch))

    def on_feedback(self, pick: Pick, feedback: ResponseFeedback, *, now: float) -> None:
        decision = pick.decision
        if feedback.status is not None:
            self._judge(pick, feedback.status, proof=Proof.TOKEN, now=now)
        decision.cached_tokens = feedback.cached_tokens
        decision.output_tokens = feedback.completion_tokens
        if feedback.first_token_at is not None:
            decision.ttft_s = feedback.first_token_at - pick.sent.at
            if pick.phase in BEGUN and (decision.status or 0) < 300:
                self._guesses.computed(pick, now=now)
        if feedback.prompt_tokens and pick.prompt.teaches:
            tokens = self._caches.token_estimate(pick.state.model)
            tokens.learn(pick.prompt.size, feedback.prompt_tokens)

    def end(self, pick: Pick, *, outcome: Outcome, now: float) -> None:
        """Release the booking of a request that is over."""
        phase, status = pick.phase, pick.decision.status
        if phase in OVER:
            return
        enter(pick, _ENDS[outcome])
        pick.computed = outcome == "ended" and status is not None and status < 300 and pick.asks
        pick.decision.outcome = outcome
        self._fleet.answers.left(pick.wait)
        if outcome == "failed" and (status is None or status < 300):
            pick.failed = True
            self._failed(pick, now=now)  # the answer broke off
        may_be_empty = pick.computed and self._may_be_empty(pick, now=now)
        if pick.guess.proven:
            self._guesses.used(pick.guess, now=now)
        elif may_be_empty:
            self._guesses.doubt(pick, now=now)
        elif status is not None and status < 300 and (outcome == "ended" or not pick.streams):
            self._guesses.computed(pick, now=now)
        else:
            self._guesses.lost(pick)
        pick.state.release(pick.guess.booking, computed=pick.computed, now=now)
        if pick.prefill is not None:
            self._prefilling.over(pick.prefill, now=now)
        if pick.computed and self._fleet.failures.marks:
            self._fleet.failures.ended(pick.state, now=now)
        if pick.computed and pick.prompt.teaches:
            pick.state.window.add(pick.prompt.size)
        self._send(Ended(now, pick))

    def detach(self, pick: Pick, *, now: float) -> None:
        """Stop following a request whose stream is let go while the answer continues. From now on scrapes
        count the request. An answer that is not streamed is over, and so is an error: its headers came when
        it was finished.
        """
        if pick.over:
            return
        began, status = pick.phase in BEGUN, pick.decision.status or 0
        if began and (status >= 300 or not pick.streams):
            self.end(pick, outcome="failed" if status >= 500 else "ended", now=now)
            return
        if began:
            self._fleet.failures.ended(pick.state, now=now)  # the last event of this answer
        enter(pick, Phase.DETACHED)
        self._fleet.answers.left(pick.wait)
        pick.decision.outcome = "detached"
        pick.state.detach()
        if pick.prefill is not None:
            self._prefilling.detach(pick.prefill, now=now)
        self._guesses.detach(pick)
        self._send(Ended(now, pick))

    # -- what an answer says of its server -------------------------------------------------------------------

    def _judge(self, pick: Pick, status: int, *, proof: Proof = Proof.BEGUN, now: float) -> None:
        """Act on what an answer says of its server: first its headers, and then its body, if it is read.
        status: that of the headers, or `ResponseFeedback.status`.
        """
        fleet, state, model, says = self._fleet, pick.state, pick.decision.model, _says(pick, status, proof)
        if isinstance(says, Proof):
            fleet.answers.well(state, model, path_hash=pick.path_hash, proof=says, now=now)
            if fleet.failures.marks:
                fleet.failures.good(state, model, proof=says, now=now)
            return
        helper = pick.prefill if proof is Proof.BEGUN else None  # later the prompt is computed
        if status >= 300:
            pick.decision.status = status
            pick.failed = helper is None and is_fault(status)
            self._guesses.lost(pick)
        if status >= 300 or says is Form.BARE:
            self._no_token(pick, now=now)
        if says in (Form.FAILS, Form.TELLS):
            # Of the two servers, the one that computed the prompt is suspected first.
            # Once it is ejected, the next answers show whether the other one fails.
            suspect = helper or pick
            if suspect.state.process == suspect.guess.process:
                fleet.failures.failed(suspect.state, says, model, now=now)
        elif says is not None:
            counts = fleet.failures.compare(state, says, model, path_hash=pick.path_hash, now=now)
            pick.failed = counts and says is Form.BARE

    def _may_be_empty(self, pick: Pick, *, now: float) -> bool:
        """Return whether an answer that began well may hold no token. It ended very soon, and nobody has read
        a token there lately. Or it ended before its prompt can be computed, and then the pick is not
        `computed`: if a client leaves, Envoy reports an end. The server may be faster than V, and a prompt
        with pictures shorter than the guess, by `MOST_SLOWNESS` times.
        """
        if pick.decision.kind in _WITHOUT_TOKENS:
            return False
        model, path_hash = pick.decision.model, pick.path_hash
        if self._fleet.answers.ended(pick.state, pick.wait, model, path_hash=path_hash, now=now):
            self._no_token(pick, now=now)
        takes_s = pick.guess.booking.tokens / (MOST_SLOWNESS * pick.state.tokens_per_s)
        if pick.streams and not pick.guess.proven and now - pick.wait.sent_at < takes_s:
            pick.computed = False
            return True
        return pick.no_token

    def _no_token(self, pick: Pick, *, now: float) -> None:
        if pick.no_token:
            return
        pick.no_token = True
        tokens = pick.decision.prompt_tokens - pick.decision.matched_tokens
        self._fleet.answers.no_token(pick.state, sent_at=pick.wait.sent_at, tokens=tokens, now=now)

    def _failed(self, pick: Pick, *, now: float) -> None:
        if pick.state.process != pick.guess.process:
            return  # another process serves under this name now
        self._fleet.failures.failed(pick.state, Form.FAILS, pick.decision.model, now=now)

    # -- parts -----------------------------------------------------------------------------------------------

    def _book(
        self, considered: Considered, state: EndpointState, decision: Decision, sent: SentPick, *, now: float
    ) -> Pick:
        """Book the work on the chosen endpoint."""
        question, prompt = considered.question, considered.prompt
        streams = question.inference.stream
        cached = decision.matched_tokens if decision.prefill is None else prompt.tokens
        guess = self._guesses.expect(state, prompt, cached=cached, adapter=decision.adapter, now=now)
        share, failures = self._caches.spec.sampling.share, self._fleet.failures
        reads = (state.account.doubted or failures.marks) and failures.sent(state, decision.model, now=now)
        sampled = question.makes_state or (share > 0 and (self._rng.random() < share or bool(reads)))
        server = state.endpoint
        set_headers: tuple[tuple[str, str], ...] = ()
        if server.rank is not None:  # the request names this data parallel rank, so that no other takes it
            decision.destinations = decision.destinations[:1]
            set_headers = ((RANK_ADDRESS, server.address.text), (RANK, str(server.rank)))
        pick = Pick(
            decision=decision,
            destinations=decision.destinations,
            sampled=sampled,
            phase=Phase.SENT,
            set_headers=set_headers,
            state=state,
            streams=streams,
            prompt=prompt,
            guess=guess,
            sent=sent,
            asks=bool(decision.model or prompt.size.text_bytes or decision.unread),
            path_hash=question.path_hash,
            body_hash=question.body_hash,
            wait=self._fleet.answers.sent(state, model=decision.model, streams=streams, now=now),
        )
        self._guesses.follow(pick)
        return pick

    def _move(self, pick: Pick, served: Address, *, now: float) -> None:
        """Move booking and table entry from the first choice to the endpoint that really serves."""
        pick.state.release(pick.guess.booking, computed=False, now=now)
        self._guesses.lost(pick, over=False)
        self._fleet.answers.left(pick.wait)
        state = self._fleet.at(served)
        if state is None:
            # An endpoint that has just left the fleet, or that will join it later,
            # gets the booking on a state that no pick uses.
            stranger = Endpoint(name=EndpointName(str(served)), address=served, model=pick.state.model)
            state = self._fleet.new_state(stranger)
            state.gone = True
        if pick.guess.table is not self._caches.table:  # prompts are cut differently now
            pick.prompt = replace(pick.prompt, chain=[])
        prompt, cached = pick.prompt, 0
        if pick.prefill is not None:
            cached = prompt.tokens
        elif not state.gone:
            held = self._caches.table.match(prompt.chain).get(state.endpoint.name, 0)
            cached = self._caches.cached_at(state, prompt, held)
        pick.state, pick.wait.account = state, state.account
        pick.guess = self._guesses.expect(
            state, prompt, cached=cached, adapter=pick.decision.adapter, now=now
        )
        self._guesses.follow(pick)
        self._send(Moved(now, pick))


def _says(pick: Pick, status: int, proof: Proof) -> Proof | Form | None:
    """Return what an answer with this status says of its server: how far it proves that the server is well,
    or in which form the server fails, if others do not. None: nothing.
    """
    if pick.state.process != pick.guess.process:
        return None  # another process serves under this name now
    if status < 300:
        # An answer without a body is right for a request without one, such as OPTIONS.
        if not pick.asks:
            return None
        return Form.BARE if status in (NO_CONTENT, PARTIAL) else proof
    if is_fault(status):
        return Form.FAILS if proof is Proof.BEGUN else Form.TELLS
    if status == 501 or not pick.decision.model:
        return None
    if status != 404:
        return Form.REFUSES
    # If the body is opaque or unread, the 404 may mean a stored response that the body names.
    return None if any(pick.prompt.size.media) or pick.decision.unread else Form.LACKS
