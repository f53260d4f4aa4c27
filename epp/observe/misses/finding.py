"""Finds out why prompt tokens were not in the cache of the server that got them.

A listener of the picker: on the path of a request it only appends to a bounded queue. It does its work some
tenths of a second after a server has computed the prompt. Prompts that no server computed do not count. The
decision says what the picker believed at the pick, and `Seen` knows what happened to a chunk before. Pure, on
one thread with the picker; `explaining` calls `work`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from epp.base.types import EndpointName
from epp.config.policy import PolicySpec
from epp.observe.misses import accounts as causes
from epp.observe.misses.accounts import Accounts, Bucket, Cause
from epp.observe.misses.seen import Seen, SentPrompt
from epp.picker.events import Pick, PickerEvent, Proved
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import ChunkSchedule
from epp.picker.scheduling.candidates import ShownCandidates

_MOST_WAITING_STEPS: Final = 2**18
"""A step takes about 40 bytes of memory, and a microsecond of work."""
_REQUEST_STEPS: Final = 256
"""The steps of a request besides those for its chunks, one each: it holds its decision in memory."""


class Misses:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._waiting: deque[tuple[Proved, Pick]] = deque()
        self._waiting_steps = 0
        self.accounts = Accounts()
        self.seen = Seen()
        self.skipped = 0
        """Requests that were skipped because too many waited, or too long ones."""

    def on_event(self, event: PickerEvent) -> None:
        if not isinstance(event, Proved) or not isinstance(event.work, Pick):
            return
        steps = self._waiting_steps + _steps(event.work)
        if steps > _MOST_WAITING_STEPS:
            self.skipped += 1
            return
        self._waiting_steps = steps
        self._waiting.append((event, event.work))

    def work(self, *, steps: int) -> bool:
        """Process waiting requests until these steps are done. Return whether requests still wait."""
        end = self._waiting_steps - steps
        while self._waiting and self._waiting_steps > end:
            proved, request = self._waiting.popleft()
            self._waiting_steps -= _steps(request)
            self._look_at(proved, request)
        return bool(self._waiting)

    def check_integrity(self) -> None:
        self.seen.check_integrity()
        waiting = sum(_steps(request) for _, request in self._waiting)
        assert waiting == self._waiting_steps <= _MOST_WAITING_STEPS

    # -- one request -----------------------------------------------------------------------------------------

    def _look_at(self, proved: Proved, request: Pick) -> None:
        decision, chain, guess = request.decision, request.chain, request.guess
        bucket = self.accounts.bucket(now=proved.at)
        bucket.request(
            f"{decision.policy} ({decision.rule})",
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
        )
        missed = decision.prompt_tokens - decision.matched_tokens
        if not isinstance(decision.candidates, ShownCandidates) or decision.unread:
            bucket.miss(causes.UNREAD, missed)
            return
        best = max(decision.candidates.best_cached_tokens, decision.matched_tokens)
        held_elsewhere = best - decision.matched_tokens
        if held_elsewhere > 0:
            low = best < _least_gain(self._picker.policy.spec, decision.prompt_tokens)
            holder = next((c.name for c in decision.candidates if c.matched_tokens == best), None)
            bucket.miss(causes.LOW_GAIN if low else causes.ELSEWHERE, held_elsewhere, server=holder)
        if guess.table is self._picker.caches.table:
            self._split(bucket, request, best=best)
        else:
            bucket.miss(causes.NEW, missed - held_elsewhere)  # prompts are cut differently now
        if proved.recorded.added:
            sent = SentPrompt(request.state.endpoint.name, guess.process, request.wait.sent_at)
            self.seen.note(chain[proved.recorded.held :], sent)

    def _split(self, bucket: Bucket, request: Pick, *, best: int) -> None:
        """Find the cause for each chunk that no candidate held. The remaining tokens are ends of prompts."""
        decision, chain, schedule = request.decision, request.chain, request.guess.table.schedule
        tokens_per_byte = decision.prompt_tokens / max(1, request.prompt.size.text_bytes)
        first = _chunks_of(best, tokens_per_byte, schedule, block=_block_tokens(request))
        unknown = chain[first:]
        end_bytes = schedule.end_bytes
        whole = (end_bytes(len(chain)) - end_bytes(first)) * tokens_per_byte if unknown else 0.0
        bucket.miss(causes.TAIL, decision.prompt_tokens - best - whole)
        if not unknown:
            return
        if self.seen.none_of(unknown):
            bucket.miss(causes.NEW, whole)
            return
        one_in, followed = self.seen.one_in, self.seen.get
        held = self._picker.caches.table.match(chain)
        parts: dict[tuple[Cause, EndpointName | None], float] = {}
        for n, chunk in enumerate(unknown, first):
            if chunk & (one_in - 1):
                continue
            sent = followed(chunk)
            part: tuple[Cause, EndpointName | None] = causes.NEW, None
            if sent is not None and sent.at <= request.wait.sent_at:  # else it was after this pick
                part = self._cause_of(sent, request, held=held.get(sent.server, 0) > n), sent.server
            size_bytes = end_bytes(n + 1) - end_bytes(n)
            parts[part] = parts.get(part, 0.0) + size_bytes * tokens_per_byte * one_in
        for (cause, server), tokens in parts.items():
            bucket.miss(cause, tokens, server=server)

    def _cause_of(self, sent: SentPrompt, request: Pick, *, held: bool) -> Cause:
        """Return the cause for a chunk that was sent somewhere before. held: that server still holds it."""
        state = self._picker.fleet.get(sent.server)
        if state is None or state.process != sent.process:
            return causes.RESTARTED
        return causes.UNAVAILABLE if held and state is not request.state else causes.EVICTED


def _steps(request: Pick) -> int:
    return _REQUEST_STEPS + len(request.chain)


def _least_gain(spec: PolicySpec, prompt_tokens: int) -> float:
    return max(spec.gain.min_match_tokens, spec.gain.min_match_ratio * prompt_tokens)


def _block_tokens(request: Pick) -> int:
    metrics = request.state.metrics
    return (metrics.block_size if metrics is not None else None) or 16


def _chunks_of(tokens: int, tokens_per_byte: float, schedule: ChunkSchedule, *, block: int) -> int:
    """Return the number of chunks that gave this many cached tokens. Tokens are rounded down to blocks."""
    return schedule.chunks_in(int((tokens + block) / tokens_per_byte)) if tokens else 0
