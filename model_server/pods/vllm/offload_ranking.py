"""Decides which chunk of vLLM's CPU offload tier is evicted first: the chunk with the fewest uses.

vLLM looks up a prefix from its head on, and stops at the first missing chunk. So a use of a chunk is also a
use of the chunks before it, even if vLLM did not report these (it does not report chunks that its GPU cache
holds). Of chunks with equal uses, the chunk that was used longest ago is evicted first; within one prompt,
the tail is evicted first.

Uses are halved at intervals, because otherwise a chunk that was popular once would stay forever. Uses of
chunks that left the tier are remembered for a while.

Invariants (`check_integrity`): exactly the idle chunks of the tier are ranked; the memory of chunks outside
the tier is bounded.

This module does no I/O, and uses nothing of vLLM but the names of its chunks. Caller: the cache policy.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from model_server.tiers.weakest_first import WeakestFirst

REMEMBERED_PER_CHUNK = 4
"""The number of remembered chunks that left the tier, for each chunk that fits in it."""
USES_PER_CHUNK = 16
"""The number of uses between two halvings, for each chunk that fits in the tier."""

ChunkKey = bytes
"""vLLM's name of a chunk: its block hash and the KV cache group."""


@dataclass(slots=True)
class _Chunk:
    num_uses: int = 0
    last_use: int = 0
    parent: ChunkKey | None = None
    """The chunk before it. All prompts that contain this chunk have the same chunk before it."""


class OffloadRanking:
    def __init__(self, *, capacity_chunks: int) -> None:
        self._capacity_chunks = capacity_chunks
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._resident: set[ChunkKey] = set()
        self._gone: OrderedDict[ChunkKey, None] = OrderedDict()
        """Known chunks that are not in the tier, in the order of their last uses, the oldest first."""
        self._evictable = WeakestFirst[ChunkKey, tuple[int, int]]()
        self._chunk_tokens = 0
        self._now = 0
        self._uses_until_halved = capacity_chunks * USES_PER_CHUNK

    def observe(
        self, keys: Sequence[ChunkKey], *, ends_tokens: Sequence[int | None], counted: set[ChunkKey]
    ) -> None:
        """Count that a request used these chunks of one KV cache group, head first. `ends_tokens` are the
        positions at which the chunks end. `counted` holds the chunks that this request has used so far: each
        chunk counts once for a request, however often it is reported.
        """
        self._learn(keys, ends_tokens)
        seen: set[ChunkKey] = set()
        for last in reversed(keys):
            key: ChunkKey | None = last
            while key is not None and key not in seen and (chunk := self._chunks.get(key)) is not None:
                seen.add(key)
                self._count(key, chunk, counted)
                key = chunk.parent
        self._forget_oldest()
        if self._uses_until_halved <= 0:
            self._halve()

    def insert(self, key: ChunkKey) -> None:
        """Add the chunk to the tier. The chunk may not be evicted yet."""
        if key not in self._chunks:
            self._chunks[key] = _Chunk()
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

    def num_uses(self, key: ChunkKey) -> int:
        """Return the uses of a chunk, halved at intervals. Raise KeyError if the chunk is not known."""
        return self._chunks[key].num_uses

    def check_integrity(self, idle: Mapping[ChunkKey, bool]) -> None:
        """Check the invariants. `idle` says for each chunk in the tier whether nothing reads or writes it."""
        assert self._resident == idle.keys()
        assert self._evictable.filed.keys() == {key for key, is_idle in idle.items() if is_idle}
        assert self._resident.isdisjoint(self._gone)
        assert self._resident | self._gone.keys() == self._chunks.keys()
        assert len(self._gone) <= self._capacity_chunks * REMEMBERED_PER_CHUNK
        self._evictable.check_integrity(self._rank)

    def _learn(self, keys: Sequence[ChunkKey], ends_tokens: Sequence[int | None]) -> None:
        """Learn which chunk each chunk continues. All chunks have the same size, and end at multiples of this
        size, which is learned too.
        """
        self._chunk_tokens = math.gcd(self._chunk_tokens, *(end for end in ends_tokens if end is not None))
        before: tuple[ChunkKey, int] | None = None
        for key, end in zip(keys, ends_tokens, strict=True):
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = _Chunk()
                self._gone[key] = None
            if end is not None and before is not None and before[1] == end - self._chunk_tokens:
                chunk.parent = before[0]
            before = None if end is None else (key, end)

    def _count(self, key: ChunkKey, chunk: _Chunk, counted: set[ChunkKey]) -> None:
        self._now += 1
        chunk.last_use = self._now
        if key in self._gone:
            self._gone.move_to_end(key)
        if key not in counted:
            counted.add(key)
            chunk.num_uses += 1
            self._uses_until_halved -= 1

    def _rank(self, key: ChunkKey) -> tuple[int, int]:
        chunk = self._chunks[key]
        return chunk.num_uses, chunk.last_use

    def _halve(self) -> None:
        self._uses_until_halved = self._capacity_chunks * USES_PER_CHUNK
        for chunk in self._chunks.values():
            chunk.num_uses -= chunk.num_uses // 2
        for key in list(self._evictable.filed):
            self._evictable.lowered(key, self._rank(key))

    def _forget_oldest(self) -> None:
        while len(self._gone) > self._capacity_chunks * REMEMBERED_PER_CHUNK:
            key, _ = self._gone.popitem(last=False)
            del self._chunks[key]
