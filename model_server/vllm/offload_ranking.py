"""Decides which chunk of vLLM's CPU offload tier is evicted first. The score is `by_product` of the tiers,
from the facts that vLLM gives to its cache policies.

vLLM says which chunks a request used and where they end in its prompt, but never which tokens mattered. So
requests have to name their important tokens (`important_tokens`). The score uses a running mean over the
requests that named any. As long as no request has named any, all tokens of a chunk count, and the score is
the number of uses.

vLLM looks up a prefix from its head on, and stops at the first missing chunk. So a use of a chunk is also a
use of the chunks before it, even if vLLM did not report these (it does not report chunks that its GPU cache
holds). And a chunk is at least as important as each chunk that can be found only through it. Of chunks with
equal scores, the chunk that was used longest ago is evicted first; within one prompt, the tail is evicted
first.

Uses are halved at intervals, because otherwise a chunk that was popular once would stay forever. Uses of
chunks that left the tier are remembered for a while.

Invariants (`check_integrity`): exactly the idle chunks of the tier are ranked; the memory of chunks outside
the tier is bounded.

This module does no I/O, and uses nothing of vLLM but the names of its chunks. Caller: the cache policy.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from model_server.tiers.placement import ChunkUse, by_product
from model_server.tiers.weakest_first import WeakestFirst
from model_server.vllm.important_tokens import ImportantTokens

REMEMBERED_PER_CHUNK = 4
"""The number of remembered chunks that left the tier, for each chunk that fits in it."""
USES_PER_CHUNK = 16
"""The number of uses between two halvings, for each chunk that fits in the tier."""

ChunkKey = bytes
"""vLLM's name of a chunk: its block hash and the KV cache group."""


@dataclass(slots=True)
class RequestUses:
    """One request's share of the counts."""

    important: ImportantTokens | None = None
    counted: set[ChunkKey] = field(default_factory=set)


@dataclass(slots=True)
class _Chunk:
    end_tokens: int | None
    """The position at which the chunk ends, in every prompt that contains the chunk."""
    use: ChunkUse
    parent: ChunkKey | None = None
    mean_named_tokens: float = 0
    """The mean number of important tokens, over the requests that named any."""
    num_naming_requests: int = 0
    behind: float = 0
    """The important tokens of the most important chunk that can only be found through this chunk."""


class OffloadRanking:
    def __init__(self, *, capacity_chunks: int) -> None:
        self._capacity_chunks = capacity_chunks
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._resident: set[ChunkKey] = set()
        self._gone: OrderedDict[ChunkKey, None] = OrderedDict()
        """Known chunks that are not in the tier, in the order of their last uses, the oldest first."""
        self._evictable = WeakestFirst[ChunkKey, tuple[float, int]]()
        self._chunk_tokens = 0
        self._now = 0
        self._uses_until_halved = capacity_chunks * USES_PER_CHUNK

    def observe(
        self, keys: Sequence[ChunkKey], *, ends_tokens: Sequence[int | None], request: RequestUses
    ) -> None:
        """Count that a request used these chunks of one KV cache group, head first. Each chunk counts once
        for a request, however often it is reported.
        """
        self._learn(keys, ends_tokens)
        seen: set[ChunkKey] = set()
        for last in reversed(keys):
            key: ChunkKey | None = last
            behind = 0.0
            while key is not None and key not in seen and (chunk := self._chunks.get(key)) is not None:
                seen.add(key)
                chunk.behind = max(chunk.behind, behind)
                self._count(key, chunk, request)
                behind = chunk.use.num_important
                key = chunk.parent
        self._forget_oldest()
        if self._uses_until_halved <= 0:
            self._halve()

    def insert(self, key: ChunkKey) -> None:
        """Add the chunk to the tier. The chunk may not be evicted yet."""
        if key not in self._chunks:
            self._chunks[key] = self._new(None)
        self._gone.pop(key, None)
        self._resident.add(key)

    def remove(self, key: ChunkKey) -> None:
        self._resident.remove(key)
        self._gone[key] = None
        if key in self._evictable.filed:
            self._evictable.remove(key)
        self._forget_oldest()

    def pin(self, key: ChunkKey) -> None:
        self._evictable.remove(key)

    def unpin(self, key: ChunkKey) -> None:
        self._evictable.file(key, self._rank(key))

    def take_weakest(self, count: int, *, spared: Collection[ChunkKey]) -> list[ChunkKey] | None:
        """Remove this many chunks, the weakest first, but no pinned chunk and none of `spared`. Return None
        and change nothing if there are not enough chunks.
        """
        taken: list[ChunkKey] = []
        passed: list[ChunkKey] = []
        while len(taken) < count and (key := self._evictable.weakest(self._rank)) is not None:
            self._evictable.remove(key)
            (passed if key in spared else taken).append(key)
        enough = len(taken) == count
        for key in passed if enough else passed + taken:
            self.unpin(key)
        if not enough:
            return None
        for key in taken:
            self.remove(key)
        return taken

    def score(self, key: ChunkKey) -> float:
        """Return important tokens x uses. Raise KeyError if the chunk is not known."""
        return by_product(self._chunks[key].use)

    def check_integrity(self, idle: Mapping[ChunkKey, bool]) -> None:
        """Check the invariants. `idle` says for each chunk in the tier whether nothing reads or writes it."""
        assert self._resident == idle.keys()
        assert self._evictable.filed.keys() == {key for key, is_idle in idle.items() if is_idle}
        assert self._resident.isdisjoint(self._gone)
        assert self._resident | self._gone.keys() == self._chunks.keys()
        assert len(self._gone) <= self._capacity_chunks * REMEMBERED_PER_CHUNK
        self._evictable.check_integrity(self._rank)

    def _learn(self, keys: Sequence[ChunkKey], ends_tokens: Sequence[int | None]) -> None:
        """Learn the size of chunks, and which chunk each chunk continues. All chunks have the same size, and
        end at multiples of this size.
        """
        self._chunk_tokens = math.gcd(self._chunk_tokens, *(end for end in ends_tokens if end is not None))
        before: tuple[ChunkKey, int] | None = None
        for key, end in zip(keys, ends_tokens, strict=True):
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = self._new(end)
                self._gone[key] = None
            if end is not None and before is not None and before[1] == end - self._chunk_tokens:
                chunk.parent = before[0]
            before = None if end is None else (key, end)

    def _new(self, end_tokens: int | None) -> _Chunk:
        return _Chunk(end_tokens, ChunkUse(size_bytes=1))

    def _count(self, key: ChunkKey, chunk: _Chunk, request: RequestUses) -> None:
        self._now += 1
        chunk.use.last_use = self._now
        if key in self._gone:
            self._gone.move_to_end(key)
        if key not in request.counted:
            request.counted.add(key)
            chunk.use.num_uses += 1
            self._uses_until_halved -= 1
            self._weigh(chunk, request.important)
        own = chunk.mean_named_tokens if chunk.num_naming_requests else float(self._chunk_tokens or 1)
        chunk.use.num_important = max(own, chunk.behind)
        if key in self._evictable.filed:
            self._evictable.lowered(key, self._rank(key))

    def _weigh(self, chunk: _Chunk, important: ImportantTokens | None) -> None:
        if important is not None and chunk.end_tokens is not None:
            named = important.within(chunk.end_tokens - self._chunk_tokens, chunk.end_tokens)
            chunk.num_naming_requests += 1
            chunk.mean_named_tokens += (named - chunk.mean_named_tokens) / chunk.num_naming_requests

    def _rank(self, key: ChunkKey) -> tuple[float, int]:
        use = self._chunks[key].use
        return by_product(use), use.last_use

    def _halve(self) -> None:
        """Halve the counts. No count falls to zero, because a new chunk with few important tokens would rank
        above a chunk whose count is zero.
        """
        self._uses_until_halved = self._capacity_chunks * USES_PER_CHUNK
        for chunk in self._chunks.values():
            chunk.use.num_uses -= chunk.use.num_uses // 2
        for key in list(self._evictable.filed):
            self._evictable.lowered(key, self._rank(key))

    def _forget_oldest(self) -> None:
        while len(self._gone) > self._capacity_chunks * REMEMBERED_PER_CHUNK:
            key, _ = self._gone.popitem(last=False)
            del self._chunks[key]
