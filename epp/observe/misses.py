"""Finds out why prompt tokens were not in the cache of the server that got them, and adds them up by cause
and server over the last minutes.

`Misses` listens to the picker: on the path of a request it only appends to a bounded queue. It works through
the queue some tenths of a second later, some requests at a time, and reports the findings. Prompts that no
server computed do not count. The decision says what the picker believed at the pick, and `Seen` knows what
happened to a chunk before. `Cause` says what each cause means and what to change, as all pages and commands
show it. `app` keeps `run` running.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, Self

from epp.base.types import ChunkHash, EndpointName
from epp.picker.events import Pick, PickerEvent, Proved
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import chunks_in
from epp.picker.scheduling.candidates import ShownCandidates

_BUCKET_S: Final = 10.0
_BUCKETS: Final = 90
_MOST_PAIRS: Final = 2000
"""Most pairs of a cause and a server in a bucket. Tokens of further pairs count without their server."""


class Cause(NamedTuple):
    name: str
    title: str
    advice: str


NEW: Final = Cause(
    "new",
    "never seen before",
    "Nothing to change: no cache can hold a prompt that nobody has sent before. Prompts with a longer common "
    "beginning would help.",
)
EVICTED: Final = Cause(
    "evicted",
    "evicted before the prefix came again",
    "Add servers or KV cache (gpu-memory-utilization, KV offload), or shorten prompts. The lines above show "
    "which servers are full.",
)
ELSEWHERE: Final = Cause(
    "elsewhere",
    "sent to another server: the one with the prefix had too much to do, or the rule ignores prefixes",
    "Nothing to change if time to first token is good: waiting would have cost more. Otherwise add servers, "
    "or raise cost.uncachedTokenWeight.",
)
RESTARTED: Final = Cause(
    "restarted",
    "the server with the prefix was restarted or removed",
    "Restart servers one at a time. Look for crashes and for scale-downs.",
)
LOW_GAIN: Final = Cause(
    "low_gain",
    "the cached prefix was below the gain threshold",
    "Lower gain.minMatchTokens or gain.minMatchRatio, if these prompts matter.",
)
UNAVAILABLE: Final = Cause(
    "unavailable",
    "the server with the prefix was not a candidate",
    "Check which servers are ejected or not ready, and which servers the data plane's subset allows.",
)
TAIL: Final = Cause(
    "tail",
    "ends of prompts, shorter than a chunk or a block",
    "Nothing to change: this is the precision of the table.",
)
UNREAD: Final = Cause(
    "unread",
    "the prompt was not read",
    "Check epp_unread_bodies_total and epp_overload_ratio: bodies are too large or compressed, or the picker "
    "has too much load.",
)

CAUSES: Final = (NEW, EVICTED, ELSEWHERE, RESTARTED, LOW_GAIN, UNAVAILABLE, TAIL, UNREAD)


@dataclass(slots=True)
class Bucket:
    began_at: float
    by_policy: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The sums `requests`, `prompt_tokens` and `matched_tokens` of each policy."""
    missed: dict[Cause, dict[EndpointName | None, float]] = field(
        default_factory=lambda: {cause: {} for cause in CAUSES}
    )
    """Tokens. None: no server is named with them."""

    def miss(self, cause: Cause, tokens: float, *, server: EndpointName | None = None) -> None:
        """Add missed tokens of a cause. server: the server that is named with them."""
        if tokens <= 0:
            return
        by_server = self.missed[cause]
        if server not in by_server and sum(map(len, self.missed.values())) >= _MOST_PAIRS:
            server = None
        by_server[server] = by_server.get(server, 0.0) + tokens

    def add(self, other: Self) -> None:
        for policy, sums in other.by_policy.items():
            self.by_policy[policy].update(sums)
        for cause, by_server in other.missed.items():
            for server, tokens in by_server.items():
                self.missed[cause][server] = self.missed[cause].get(server, 0.0) + tokens

    def total(self) -> Counter[str]:
        """Return the sums over all policies."""
        return sum(self.by_policy.values(), Counter())


# -- what happened to chunks ---------------------------------------------------------------------------------

_MOST_SEEN: Final = 32_768
_OLD_S: Final = 3600.0
_MOST_WAITING_STEPS: Final = 2**18
"""A step takes about 40 bytes of memory, and a microsecond of work."""
_REQUEST_STEPS: Final = 256
"""The steps of a request besides those for its chunks, one each: it holds its decision in memory."""
_LOOK_S: Final = 0.2
_PORTION_STEPS: Final = 5_000
"""Some milliseconds. Other work runs between two portions."""
_PORTIONS: Final = 8
"""Most portions in one look."""
_MOST_SERVERS: Final = 10
"""Most servers that are named for each cause."""
_PERCENT_DIGITS: Final = 4
_USUAL_BLOCK_TOKENS: Final = 16


class SentPrompt(NamedTuple):
    """The last server that a chunk was newly sent to."""

    server: EndpointName
    process: int
    """A hash of its process."""
    at: float


class Seen:
    """Remembers the servers to which chunks of prompts were sent, in bounded memory: a sample of all chunks,
    chosen by their hashes. While there is room, every chunk is kept. When the memory is full, the oldest
    quarter is removed if it is old enough. Otherwise half of all chunks is removed by their hashes, and
    chunks with such hashes are never kept again. So every occurrence of a chunk is in the sample or none is,
    and shares stay correct (SHARDS, Waldspurger et al. 2015).
    """

    def __init__(self) -> None:
        self._sent: dict[ChunkHash, SentPrompt] = {}
        self.one_in = 1
        """This share of all chunks is in the sample: those whose hashes are multiples of it, a power of 2."""

    def sampled(self, chunks: Sequence[ChunkHash]) -> Sequence[ChunkHash]:
        mask = self.one_in - 1
        return [chunk for chunk in chunks if not chunk & mask] if mask else chunks

    def get(self, chunk: ChunkHash) -> SentPrompt | None:
        return self._sent.get(chunk)

    def none_of(self, chunks: Sequence[ChunkHash]) -> bool:
        """Return whether none of these chunks was ever sent anywhere, as far as the sample shows."""
        return self._sent.keys().isdisjoint(self.sampled(chunks))  # only sampled chunks are remembered

    def note(self, chunks: Sequence[ChunkHash], sent: SentPrompt) -> None:
        chosen = self.sampled(chunks)
        if not self._sent.keys().isdisjoint(chosen):
            for chunk in chosen:
                self._sent.pop(chunk, None)  # moves the chunk to the end of the order
        self._sent.update(dict.fromkeys(chosen, sent))
        while len(self._sent) > _MOST_SEEN:
            self._shrink(now=sent.at)

    def _shrink(self, *, now: float) -> None:
        oldest = next(iter(self._sent.values()))
        if now - oldest.at > _OLD_S:
            for chunk in list(islice(self._sent, _MOST_SEEN // 4)):
                del self._sent[chunk]
            return
        self.one_in *= 2
        self._sent = {chunk: self._sent[chunk] for chunk in self.sampled([*self._sent])}


class Misses:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._waiting: deque[tuple[Proved, Pick]] = deque()
        self._waiting_steps = 0
        self._buckets: deque[Bucket] = deque(maxlen=_BUCKETS)
        self.seen = Seen()
        self.skipped = 0
        """Requests that were skipped because too many waited, or too long ones."""

    def on_event(self, event: PickerEvent) -> None:
        if type(event) is not Proved or type(event.work) is not Pick:
            return
        steps = self._waiting_steps + _steps(event.work)
        if steps > _MOST_WAITING_STEPS:
            self.skipped += 1
            return
        self._waiting_steps = steps
        self._waiting.append((event, event.work))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for _ in range(_PORTIONS):
                if not self.work(steps=_PORTION_STEPS):
                    break
                await asyncio.sleep(0)

    def work(self, *, steps: int) -> bool:
        """Process waiting requests until these steps are done. Return whether requests still wait."""
        end = self._waiting_steps - steps
        while self._waiting and self._waiting_steps > end:
            proved, pick = self._waiting.popleft()
            self._waiting_steps -= _steps(pick)
            self._look_at(proved, pick)
        return bool(self._waiting)

    def bucket(self, *, now: float) -> Bucket:
        if not self._buckets or now - self._buckets[-1].began_at >= _BUCKET_S:
            self._buckets.append(Bucket(now))
        return self._buckets[-1]

    def over(self, window_s: float, *, now: float) -> Bucket:
        """Return the sums of the buckets that began within the window, as one bucket."""
        kept = [bucket for bucket in self._buckets if now - bucket.began_at <= window_s]
        found = Bucket(kept[0].began_at if kept else now)
        for bucket in kept:
            found.add(bucket)
        return found

    # -- one request -----------------------------------------------------------------------------------------

    def _look_at(self, proved: Proved, pick: Pick) -> None:
        decision, chain, guess = pick.decision, pick.chain, pick.guess
        bucket = self.bucket(now=proved.at)
        bucket.by_policy[f"{decision.policy} ({decision.rule})"].update(
            requests=1, prompt_tokens=decision.prompt_tokens, matched_tokens=decision.matched_tokens
        )
        missed = decision.prompt_tokens - decision.matched_tokens
        if not isinstance(decision.candidates, ShownCandidates) or decision.unread:
            bucket.miss(UNREAD, missed)
            return
        best = max(decision.candidates.best_cached_tokens, decision.matched_tokens)
        held_elsewhere = best - decision.matched_tokens
        if held_elsewhere > 0:
            gain = self._picker.policy.spec.gain
            low = best < max(gain.min_match_tokens, gain.min_match_ratio * decision.prompt_tokens)
            holder = next((c.name for c in decision.candidates if c.matched_tokens == best), None)
            bucket.miss(LOW_GAIN if low else ELSEWHERE, held_elsewhere, server=holder)
        if guess.table is self._picker.caches.table:
            self._split(bucket, pick, best=best)
        else:
            bucket.miss(NEW, missed - held_elsewhere)  # prompts are cut differently now
        if proved.held is not None:
            server = pick.state.endpoint
            sent = SentPrompt(server.name, hash((server.process, guess.process)), pick.wait.sent_at)
            self.seen.note(chain[proved.held :], sent)

    def _split(self, bucket: Bucket, pick: Pick, *, best: int) -> None:
        """Find the cause for each chunk that no candidate held. The remaining tokens are ends of prompts."""
        decision, chain, table = pick.decision, pick.chain, pick.guess.table
        tokens_per_byte = decision.prompt_tokens / max(1, pick.prompt.size.text_bytes)
        metrics = pick.state.metrics
        block = (metrics.block_size if metrics is not None else None) or _USUAL_BLOCK_TOKENS
        # cached tokens are rounded down to blocks
        first = chunks_in(table.schedule, int((best + block) / tokens_per_byte)) if best else 0
        unknown = chain[first:]
        whole = table.size_bytes(first, len(chain)) * tokens_per_byte if unknown else 0.0
        bucket.miss(TAIL, decision.prompt_tokens - best - whole)
        if not unknown:
            return
        if self.seen.none_of(unknown):
            bucket.miss(NEW, whole)
            return
        one_in, followed = self.seen.one_in, self.seen.get
        held = self._picker.caches.table.match(chain)
        parts: dict[tuple[Cause, EndpointName | None], float] = {}
        for n, chunk in enumerate(unknown, first):
            if chunk & (one_in - 1):
                continue
            sent = followed(chunk)
            part: tuple[Cause, EndpointName | None] = NEW, None
            if sent is not None and sent.at <= pick.wait.sent_at:  # else it was after this pick
                part = self._cause_of(sent, pick, held=held.get(sent.server, 0) > n), sent.server
            tokens = table.size_bytes(n, n + 1) * tokens_per_byte
            parts[part] = parts.get(part, 0.0) + tokens * one_in
        for (cause, server), tokens in parts.items():
            bucket.miss(cause, tokens, server=server)

    def _cause_of(self, sent: SentPrompt, pick: Pick, *, held: bool) -> Cause:
        """Return the cause for a chunk that was sent somewhere before. held: that server still holds it."""
        state = self._picker.fleet.get(sent.server)
        if state is None or hash((state.endpoint.process, state.process)) != sent.process:
            return RESTARTED
        return UNAVAILABLE if held and state is not pick.state else EVICTED

    # -- what people see -------------------------------------------------------------------------------------

    def account(self, window_s: float) -> dict[str, Any]:
        """Return why tokens were missed in the last `window_s` seconds, as JSON values."""
        now = time.monotonic()
        found = self.over(window_s, now=now)
        total = found.total()
        tokens = {cause: sum(by_server.values()) for cause, by_server in found.missed.items()}
        missed = sum(tokens.values())
        return {
            "window_s": round(min(window_s, now - found.began_at), 1),
            **_shown(total),
            "policies": [{"policy": name, **_shown(sums)} for name, sums in found.by_policy.items()],
            "causes": [
                {
                    "cause": cause.name,
                    "title": cause.title,
                    "tokens": round(tokens[cause]),
                    "share_of_missed": _ratio(tokens[cause], missed),
                    "share_of_prompt": _ratio(tokens[cause], total["prompt_tokens"]),
                    "servers": self._servers(found.missed[cause]),
                    "advice": cause.advice,
                }
                for cause in sorted(tokens, key=lambda cause: -tokens[cause])
            ],
            "chunks_followed": f"1 in {self.seen.one_in}",
            "requests_skipped": self.skipped,
        }

    def _servers(self, missed: Mapping[EndpointName | None, float]) -> list[dict[str, Any]]:
        """Return the servers with the most missed tokens of one cause, and how full their caches are."""
        named = [(name, tokens) for name, tokens in missed.items() if name is not None]
        named.sort(key=lambda item: -item[1])
        servers = []
        for name, tokens in named[:_MOST_SERVERS]:
            mirror = self._picker.caches.table.mirrors.get(name)
            room = mirror.capacity_bytes if mirror else None
            full = _ratio(min(mirror.used_bytes, room), room) if mirror and room else None
            servers.append({"name": name, "tokens": round(tokens), "full": full})
        return servers


def _steps(pick: Pick) -> int:
    return _REQUEST_STEPS + len(pick.chain)


def _shown(sums: Mapping[str, int]) -> dict[str, Any]:
    return {
        "requests": sums["requests"],
        "prompt_tokens": sums["prompt_tokens"],
        "matched_tokens": sums["matched_tokens"],
        "hit_ratio": _ratio(sums["matched_tokens"], sums["prompt_tokens"]),
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, _PERCENT_DIGITS) if whole else 0.0
