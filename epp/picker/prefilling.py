"""Decides whether the answering endpoint computes a prompt itself, or a prefill endpoint computes it and then
sends its KV cache (P/D). Books the work there until the answer begins.

The rule chooses the answering server as usual. `commit` calls this module afterwards, and only if some
endpoint has a role that prefills. The expression of the least-cost rule gives both prices, in seconds. The
price of the prefill endpoint also includes the transfer: the tokens that the answering endpoint lacks, times
the bytes of a token, divided by the bandwidth. A prefill-only endpoint writes no answers, so a prompt stalls
no answers there. All methods are synchronous. Each booking is released exactly once, and one event is sent
then.
"""

import random
from typing import Final

import numpy as np
from msgspec.structs import replace

from epp.base.types import PREFILLER, ApiKind
from epp.config.policy import PolicySpec
from epp.picker.decision import Prefill, Question
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.marks import Proof, is_fault
from epp.picker.events import Pick, PrefillEnded, PrefillJob
from epp.picker.fleet_news import FleetNews
from epp.picker.scheduling.least_cost import prices_s
from epp.picker.scheduling.schedule import (
    Choice,
    Weighed,
    any_of,
    fewest,
    loading_s,
    over_limits,
    uncached_tokens,
)
from epp.picker.scheduling.snapshot import SchedulingRequest, Snapshot
from epp.picker.server_caches import Prompt

_KINDS: Final = frozenset({ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.RESPONSES})
"""APIs whose answers are written token by token after the prompt."""


Helper = tuple[EndpointState, Prefill]
"""The server that should compute a prompt for another server, and the reasons."""


class Prefilling:
    def __init__(self, news: FleetNews, rng: random.Random) -> None:
        self._fleet, self._caches, self._guesses = news.fleet, news.caches, news.guesses
        self._send = news.send
        self._rng = rng

    def choose(
        self, question: Question, prompt: Prompt, choice: Choice, *, adapter: str, now: float
    ) -> Helper | None:
        """Return the server that should compute the prompt for the first server of `choice`. None: the first
        server should compute the prompt itself.
        """
        fleet, model, spec = self._fleet, question.inference.model, self._caches.spec
        if question.inference.kind not in _KINDS or question.asks_only:  # no header would name the server
            return None
        here = choice.weighed.seen.slots[choice.places[0]]
        slots = [slot for slot in fleet.prefillers(model, subset=question.subset) if slot != here]
        if not slots:
            return None
        snapshot = fleet.snapshot(slots, model=model, adapter=adapter, spec=spec, now=now)
        cached, _ = self._caches.cached_tokens(prompt, fleet.columns.block_tokens)
        request = SchedulingRequest(at=now, prompt_tokens=prompt.tokens, cached_tokens=cached[snapshot.at])
        found = computed_elsewhere(choice, request, snapshot, spec=spec, rng=self._rng)
        if found is None:
            return None
        place, why = found
        state = fleet.states()[snapshot.slots[place]]
        if place in snapshot.trials:
            fleet.failures.tried(state, model, now=now)
        return state, why

    def book(self, pick: Pick, helper: Helper, *, now: float) -> None:
        """Book the prompt on the prefill server, and name this server in the request."""
        state, chosen = helper
        guess = self._guesses.expect(
            state,
            pick.prompt,
            cached=chosen.matched_tokens,
            adapter=pick.decision.adapter,
            now=now,
        )
        pick.prefill = PrefillJob(state, pick.prompt, guess)
        self._guesses.follow(pick.prefill)
        pick.set_headers = (*pick.set_headers, (PREFILLER, chosen.address))

    def over(self, job: PrefillJob, *, status: int | None = None, now: float) -> None:
        """Release the booking, because the answer begins with this status, and so the prefill endpoint has
        finished. After an error nobody knows whether it has. None: the request is over. If its answer has not
        begun, it will not begin. May be called again.
        """
        if job.over:
            return
        job.over, computed = True, status is not None and status < 300
        job.state.release(job.guess.booking, computed=computed, now=now)
        if computed:
            self._guesses.computed(job, now=now)
        else:
            self._guesses.lost(job)
        failed = status is not None and is_fault(status)
        self._send(PrefillEnded(now, job, "computed" if computed else "lost", failed=failed))
        if computed and self._fleet.failures.marks and self._guesses.holds(job.guess):
            self._fleet.failures.good(job.state, proof=Proof.BEGUN, now=now)

    def detach(self, job: PrefillJob, *, now: float) -> None:
        """Stop following the prompt, because the beginning of the answer will not be reported. From now on
        scrapes count the prompt, and its booking drains.
        """
        if job.over:
            return
        job.over = True
        job.state.detach()
        self._guesses.detach(job)
        self._send(PrefillEnded(now, job, "detached"))


def computed_elsewhere(
    choice: Choice,
    request: SchedulingRequest,
    prefilling: Snapshot,
    *,
    spec: PolicySpec,
    rng: random.Random,
) -> tuple[int, Prefill] | None:
    """Return the prefill endpoint that should compute the prompt for the first endpoint of `choice`, since
    that is faster: its place in `prefilling`, and the record. None: the first endpoint should compute the
    prompt itself.

    request: the request as prefill endpoints see it, with a cached part for each place in `prefilling`.
    """
    chosen = choice.places[0]
    lacking = float(choice.weighed.uncached_tokens[chosen])
    if lacking < spec.disaggregation.min_uncached_tokens:
        return None
    # The answering endpoint has to load the adapter, and may fail, in either case.
    here = choice.weighed.narrowed(np.array([chosen]))
    here = replace(here, seen=replace(here.seen, failure_share=None), load_s=None)
    here_s = float(prices_s(here, here.uncached_tokens, spec)[0])
    uncached, moving = uncached_tokens(request, spec.gain), spec.disaggregation
    moving_s = (
        moving.overhead_seconds + lacking * moving.kv_bytes_per_token / moving.transfer_bytes_per_second
    )
    # Its requests in flight are other prompts, unless the endpoint writes answers too.
    answers = np.where(prefilling.roster.answers[prefilling.at], prefilling.in_flight, 0.0)
    load_s = loading_s(prefilling, load_s=spec.lora.load_seconds)
    weighed = Weighed(replace(prefilling, in_flight=answers), request, uncached, load_s)
    there_s = prices_s(weighed, uncached, spec) + moving_s
    if prefilling.trials:
        place = prefilling.trials[0]
    else:
        excluded = over_limits(spec.load, prefilling)
        if prefilling.failing is not None:
            excluded["failing"] = prefilling.failing
        there_s = np.where(any_of(excluded), np.inf, there_s) if excluded else there_s
        place = fewest(there_s, rng)[0]
    price_s = float(there_s[place])
    if price_s >= here_s:
        return None
    slot, uncached_here = prefilling.slots[place], int(uncached[place])
    ahead_tokens = float(prefilling.undone_tokens[place]) + uncached_here
    return place, Prefill(
        name=prefilling.roster.names[slot],
        address=str(prefilling.roster.addresses[slot]),
        matched_tokens=int(request.cached_tokens[place]),
        uncached_tokens=uncached_here,
        transfer_s=moving_s,
        predicted_s=ahead_tokens / float(prefilling.rate[place]) + moving_s,
        cost_s=price_s,
        instead_of_s=here_s,
    )
