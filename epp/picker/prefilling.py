"""Chooses the prefill server for a prompt that another server answers (P/D), and books the work there until
the answer begins.

The rule chooses the answering server as usual. `commit` calls this module afterwards, and only if some
endpoint has a role that prefills. All methods are synchronous. Each booking is released exactly once, and one
event is sent then.
"""

from __future__ import annotations

import random
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from epp.base.types import PREFILLER, Address, ApiKind, InferenceRequest
from epp.config.policy import PolicySpec
from epp.picker.decision import Prefill
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.failures import is_fault
from epp.picker.endpoints.fleet import Fleet
from epp.picker.endpoints.marks import Proof
from epp.picker.events import Listener, Pick, PrefillEnded, PrefillJob
from epp.picker.guesses import Guesses
from epp.picker.scheduling.disaggregation import ComputedElsewhere, computed_elsewhere
from epp.picker.scheduling.schedule import Choice
from epp.picker.scheduling.snapshot import SchedulingRequest, Snapshot
from epp.picker.server_caches import Prompt, ServerCaches

_KINDS: Final = frozenset({ApiKind.COMPLETIONS, ApiKind.CHAT, ApiKind.RESPONSES})
"""APIs whose answers are written token by token after the prompt."""


class Helper(NamedTuple):
    """The server that should compute a prompt for another server, and the reasons."""

    state: EndpointState
    why: Prefill


class Prefilling:
    def __init__(
        self, fleet: Fleet, caches: ServerCaches, guesses: Guesses, send: Listener, rng: random.Random
    ) -> None:
        """Start without jobs. send: sends an event to all listeners."""
        self._fleet = fleet
        self._guesses = guesses
        self._caches = caches
        self._send = send
        self._rng = rng

    def choose(
        self,
        inference: InferenceRequest,
        prompt: Prompt,
        choice: Choice,
        answering: Snapshot,
        *,
        subset: AbstractSet[Address] | None,
        adapter: str,
        spec: PolicySpec,
        now: float,
    ) -> Helper | None:
        """Return the server that should compute the prompt for the first server of `choice`. None: the first
        server should compute the prompt itself.
        """
        fleet = self._fleet
        if inference.kind not in _KINDS:
            return None
        here = answering.slots[choice.places[0]]
        slots = [slot for slot in fleet.prefillers(inference.model, subset=subset) if slot != here]
        if not slots:
            return None
        snapshot = fleet.snapshot(slots, model=inference.model, adapter=adapter, spec=spec, now=now)
        held = self._caches.table.holders(prompt.chain)
        cached = self._caches.cached_tokens(prompt, held, fleet.columns.block_tokens)[snapshot.at]
        asked = SchedulingRequest(at=now, prompt_tokens=prompt.tokens, cached_tokens=cached)
        found = computed_elsewhere(choice, answering, asked, snapshot, spec=spec, rng=self._rng)
        if found is None:
            return None
        state = fleet.in_slot(snapshot.slots[found.place])
        if found.trial:
            fleet.failures.tried(state, inference.model, now=now)
        return Helper(state, _record(found, snapshot, matched=int(cached[found.place])))

    def book(self, pick: Pick, helper: Helper, *, now: float) -> None:
        """Book the prompt on the prefill server, and name this server in the request."""
        state, chosen = helper
        booking, guess = self._guesses.expect(
            state,
            pick.prompt,
            cached=chosen.matched_tokens,
            adapter=pick.decision.adapter,
            now=now,
        )
        pick.prefill = PrefillJob(state, booking, pick.prompt, guess)
        self._guesses.follow(pick.prefill)
        pick.set_headers = (*pick.set_headers, (PREFILLER, chosen.address))

    def answered(self, job: PrefillJob, *, status: int, now: float) -> None:
        """Release the booking, because the answer begins and so the prefill endpoint has finished. After an
        error nobody knows whether it has.
        """
        computed = status < 400
        self._release(job, computed=computed, failed=is_fault(status), now=now)
        if computed and self._fleet.failures.marks and self._guesses.holds(job.guess):
            self._fleet.failures.good(job.state, proof=Proof.BEGUN, now=now)

    def lost(self, job: PrefillJob, *, now: float) -> None:
        """Release the booking of a request that is over. If its answer has not begun, it will not begin."""
        self._release(job, computed=False, failed=False, now=now)

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

    def _release(self, job: PrefillJob, *, computed: bool, failed: bool, now: float) -> None:
        """Release the booking and send the event. computed: the prefill endpoint did its part, as far as is
        known.
        """
        if job.over:
            return
        job.over = True
        job.state.release(job.booking, computed=computed, now=now)
        if computed:
            self._guesses.computed(job, now=now)
        else:
            self._guesses.lost(job)
        self._send(PrefillEnded(now, job, "computed" if computed else "lost", failed=failed))


def _record(found: ComputedElsewhere, snapshot: Snapshot, *, matched: int) -> Prefill:
    slot = snapshot.slots[found.place]
    ahead_tokens = float(snapshot.undone_tokens[found.place]) + found.uncached_tokens
    return Prefill(
        name=snapshot.roster.names[slot],
        address=str(snapshot.roster.addresses[slot]),
        matched_tokens=matched,
        uncached_tokens=found.uncached_tokens,
        transfer_s=found.transfer_s,
        predicted_s=ahead_tokens / float(snapshot.rate[found.place]) + found.transfer_s,
        cost_s=found.cost_s,
        instead_of_s=found.instead_of_s,
    )
