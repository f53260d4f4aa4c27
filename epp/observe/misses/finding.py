"""Finds out why prompt tokens were not in the cache of the server that got them.

A listener of the picker: on the path of a request it only appends to a bounded queue. It does its work some
tenths of a second after a server has computed the prompt, when other pickers' events of the same moment have
arrived. Prompts that no server computed do not count. The decision says what the picker believed at the pick,
and `Seen` knows what happened to a chunk before. Pure, on one thread with the picker; `explaining` calls
`work`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final

from epp.base.types import ChunkHash, EndpointName
from epp.observe.misses import accounts as causes
from epp.observe.misses.accounts import Accounts, Bucket, Cause
from epp.observe.misses.seen import Heat, Seen, SentPrompt
from epp.picker.events import Began, Pick, PickerEvent, Proved
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import ChunkSchedule
from epp.picker.scheduling.candidates import ShownCandidates

_MOST_WAITING: Final = 1000
_MOST_SENT_CHUNKS: Final = 262_144


class Misses:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._waiting: deque[tuple[Proved, Pick]] = deque()
        self._sent: deque[Sequence[ChunkHash]] = deque()
        """The last prompts that this picker sent to some server."""
        self._sent_chunks = 0
        self.accounts = Accounts()
        self.seen = Seen()
        self.heat = Heat()
        self.skipped = 0
        """Requests that were skipped because too many waited."""

    def on_event(self, event: PickerEvent) -> None:
        if isinstance(event, Began):
            self._sent.append(event.request.chain)
            self._sent_chunks += len(event.request.chain)
            while len(self._sent) > _MOST_WAITING or self._sent_chunks > _MOST_SENT_CHUNKS:
                self._sent_chunks -= len(self._sent.popleft())
        elif isinstance(event, Proved) and isinstance(event.work, Pick):
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append((event, event.work))
            else:
                self.skipped += 1

    def work(self, *, limit: int) -> int:
        """Process up to `limit` waiting requests, and return their number."""
        done = 0
        while self._waiting and done < limit:
            proved, request = self._waiting.popleft()
            self._look_at(proved, request)
            done += 1
        return done

    def check_integrity(self) -> None:
        self.seen.check_integrity()
        self.heat.check_integrity()
        assert len(self._waiting) <= _MOST_WAITING
        assert sum(map(len, self._sent)) == self._sent_chunks <= _MOST_SENT_CHUNKS

    # -- one request -----------------------------------------------------------------------------------------

    def _look_at(self, proved: Proved, request: Pick) -> None:
        decision, chain, guess = request.decision, request.chain, request.guess
        bucket = self.accounts.bucket(now=proved.at)
        bucket.request(
            f"{decision.policy} ({decision.rule})",
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
        )
        self.heat.note(
            chain,
            request.state.endpoint.name,
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
            now=proved.at,
        )
        missed = decision.prompt_tokens - decision.matched_tokens
        if not isinstance(decision.candidates, ShownCandidates) or decision.unread:
            bucket.miss(causes.UNREAD, missed)
            return
        best = max(decision.candidates.best_cached_tokens, decision.matched_tokens)
        held_elsewhere = best - decision.matched_tokens
        if held_elsewhere > 0:
            low = best < self._picker.policy.spec.gain.min_match_tokens
            holder = next((c.name for c in decision.candidates if c.matched_tokens == best), None)
            bucket.miss(causes.LOW_GAIN if low else causes.ELSEWHERE, held_elsewhere, server=holder)
        if guess.table is self._picker.table:
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
        late, held = self._holder_now(request, first)
        if late is None and self.seen.none_of(unknown):
            bucket.miss(causes.NEW, whole)
            return
        one_in, followed = self.seen.one_in, self.seen.get
        ours = 0 if late is None else self._ours(chain)
        parts: dict[tuple[Cause, EndpointName | None], float] = {}
        for n, chunk in enumerate(unknown, first):
            if chunk & (one_in - 1):
                continue
            sent = followed(chunk)
            holder = late if n < held else None
            if sent is not None and sent.at > request.wait.sent_at:
                sent = None  # that was after this pick
            part: tuple[Cause, EndpointName | None] = causes.NEW, None
            if sent is not None:
                part = self._cause_of(sent, request, holder)
            elif n >= ours and holder is not None:
                part = causes.LATE, holder
            size_bytes = end_bytes(n + 1) - end_bytes(n)
            parts[part] = parts.get(part, 0.0) + size_bytes * tokens_per_byte * one_in
        for (cause, server), tokens in parts.items():
            bucket.miss(cause, tokens, server=server)

    def _cause_of(
        self, sent: SentPrompt, request: Pick, late: EndpointName | None
    ) -> tuple[Cause, EndpointName | None]:
        """Return the cause for a chunk that was sent somewhere before."""
        state = self._picker.fleet.get(sent.server)
        if state is None or state.process != sent.process:
            return causes.RESTARTED, sent.server
        if late == sent.server and sent.server != request.state.endpoint.name:
            return causes.UNAVAILABLE, sent.server
        return causes.EVICTED, sent.server

    def _holder_now(self, request: Pick, first: int) -> tuple[EndpointName | None, int]:
        """Return another server that now holds more of the prompt than any candidate was known to hold at the
        pick, and how many chunks.
        """
        own, table = request.state.endpoint.name, self._picker.table
        if not any(
            held > first and name != own for name, held in table.match(request.chain[: first + 1]).items()
        ):
            return None, 0
        others = [(held, name) for name, held in table.match(request.chain).items() if name != own]
        held, name = max(others)
        return name, held

    def _ours(self, chain: Sequence[ChunkHash]) -> int:
        """Return the number of these chunks that another of this picker's last requests sent to some server.

        A hash names the whole prompt before it, so equal hashes stand at equal places, and two chains are
        equal up to the place where they diverge.
        """
        most = 0
        for other in self._sent:
            if other is chain:
                continue
            if most < min(len(other), len(chain)) and other[most] == chain[most]:
                most += bisect_left(
                    range(most, min(len(other), len(chain))), True, key=lambda n: other[n] != chain[n]
                )
        return most


def _block_tokens(request: Pick) -> int:
    metrics = request.state.metrics
    return (metrics.block_size if metrics is not None else None) or 16


def _chunks_of(tokens: int, tokens_per_byte: float, schedule: ChunkSchedule, *, block: int) -> int:
    """Return the number of chunks that gave this many cached tokens. Tokens are rounded down to blocks."""
    return schedule.chunks_in(int((tokens + block) / tokens_per_byte)) if tokens else 0
