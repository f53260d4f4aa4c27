"""Decides which chunks the fast tiers keep: by score, with a lazily updated min-heap for each tier.

The disk holds a full copy of every chunk, so a chunk that leaves a tier is dropped without being written
back. A used chunk enters the fastest tier whose weakest chunks have a lower score. The chunks that it
displaces try the next tier in the same way. Uses of a chunk are counted as long as the disk has the chunk,
whether or not a fast tier has it. A request reads the chunks of a node one after the other, so each chunk
that it has read has one use more than the chunks that it has not reached yet. Therefore a chunk's last use
does not count when chunks of one node are compared.

`SCORES` has the scores by name. `uses` is the default, `product` (important tokens x uses) is the score of
the document that docs/tiers.md names. Decision 0106 has their figures.

Invariants (`check_integrity`): a chunk is in at most one tier; a tier never holds more bytes than it may.

This module does no I/O. Callers: the tiered reader, benchmarks.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from model_server.tiers.weakest_first import WeakestFirst

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class ChunkUse:
    """The known facts about one chunk on disk."""

    size_bytes: int
    num_important: float = 0
    """The number of important tokens in the chunk: the mean over its uses."""
    num_uses: int = 0
    last_use: int = 0
    node: Hashable = None
    """The chunk's node. The same requests read all chunks of a node. None means that the chunk belongs to no
    node.
    """


Score = Callable[[ChunkUse], float]


def by_product(use: ChunkUse) -> float:
    return use.num_important * use.num_uses


def by_importance(use: ChunkUse) -> float:
    return use.num_important


def by_uses_and_importance(use: ChunkUse) -> float:
    """Score a chunk by its uses. Of two chunks with equal uses, the chunk with more important tokens has the
    higher score.
    """
    return use.num_uses + use.num_important / (100 + use.num_important)


ScoreName = Literal["uses", "importance", "product"]
SCORES: Mapping[ScoreName, Score] = {
    "uses": by_uses_and_importance,
    "importance": by_importance,
    "product": by_product,
}


class _Tier(Generic[K]):
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.ranking = WeakestFirst[K, float]()

    def __contains__(self, key: K) -> bool:
        return key in self.ranking.filed

    def add(self, key: K, score: float, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.ranking.file(key, score)

    def remove(self, key: K, size_bytes: int) -> None:
        self.ranking.remove(key)
        self.used_bytes -= size_bytes


class TieredPlacement(Generic[K]):
    """The places of all chunks. `capacities_bytes` are the sizes of the tiers, fastest first. The disk is
    below them and has no entry.
    """

    def __init__(self, capacities_bytes: Sequence[int], *, score: Score = by_uses_and_importance) -> None:
        self._tiers = [_Tier[K](capacity) for capacity in capacities_bytes]
        self._score = score
        self._uses: dict[K, ChunkUse] = {}
        self._now = 0
        self._reading: K | None = None
        """The chunk that is being used now."""

    @property
    def num_tiers(self) -> int:
        """Return the number of tiers, without the disk."""
        return len(self._tiers)

    def tier_of(self, key: K) -> int:
        """Return the chunk's tier. 0 is the fastest tier, and `num_tiers` means that only the disk has the
        chunk.
        """
        for number, tier in enumerate(self._tiers):
            if key in tier:
                return number
        return len(self._tiers)

    def use(
        self, key: K, *, size_bytes: int, num_important: float, node: Hashable = None
    ) -> tuple[int, dict[K, int]]:
        """Record that a chunk is read. Return the tier where the chunk was found, and the new tier of each
        chunk that has moved because of this use. The chunk that was read may be one of them.

        `num_important` of the chunk's tokens are important to this use. `node` is read only at the first use
        of a chunk.
        """
        self._now += 1
        use = self._uses.setdefault(key, ChunkUse(size_bytes, node=node))
        assert use.size_bytes == size_bytes, "a chunk keeps its size"
        use.num_uses += 1
        use.last_use = self._now
        found = self.tier_of(key)
        self.reweigh(
            key, num_important=use.num_important + (num_important - use.num_important) / use.num_uses
        )
        if found == 0:
            return found, {}
        if found < len(self._tiers):
            self._tiers[found].remove(key, size_bytes)
        moved: dict[K, int] = {}
        self._reading = key
        self._place(key, 0, moved)
        self._reading = None
        return found, moved

    def reweigh(self, key: K, *, num_important: float) -> None:
        """Note that the number of important tokens in a known chunk has changed. Unknown chunks are not
        counted yet.
        """
        if (use := self._uses.get(key)) is None:
            return
        use.num_important = num_important
        if (tier := self.tier_of(key)) < len(self._tiers):
            self._tiers[tier].ranking.lowered(key, self._score(use))

    def forget(self, keys: Iterable[K]) -> None:
        """Forget these chunks, because the disk no longer has them, or has other content under their
        names.
        """
        for key in keys:
            use = self._uses.pop(key, None)
            if use is not None and (tier := self.tier_of(key)) < len(self._tiers):
                self._tiers[tier].remove(key, use.size_bytes)

    def resident_bytes(self, tier: int) -> int:
        return self._tiers[tier].used_bytes

    def check_integrity(self) -> None:
        for number, tier in enumerate(self._tiers):
            assert 0 <= tier.used_bytes <= tier.capacity_bytes
            tier.ranking.check_integrity(self._score_of)
            assert tier.used_bytes == sum(self._uses[key].size_bytes for key in tier.ranking.filed)
            assert all(self.tier_of(key) == number for key in tier.ranking.filed)

    def _score_of(self, key: K) -> float:
        return self._score(self._uses[key])

    def _score_against(self, weakest: K, key: K) -> float:
        """Return the score of `key` for the decision whether `weakest` must leave to make room for `key`."""
        use = self._uses[key]
        read_together = use.node is not None and self._uses[weakest].node == use.node
        if key == self._reading and read_together:
            use = replace(use, num_uses=use.num_uses - 1)
        return self._score(use)

    def _place(self, key: K, first_tier: int, moved: dict[K, int]) -> None:
        """Put the chunk into the first tier, from `first_tier` on, where it is stronger than the chunks that
        must leave. If there is no such tier, only the disk keeps it.
        """
        for number in range(first_tier, len(self._tiers)):
            displaced = self._make_room(number, key)
            if displaced is not None:
                self._tiers[number].add(key, self._score_of(key), self._uses[key].size_bytes)
                moved[key] = number
                for weaker in displaced:
                    self._place(weaker, number + 1, moved)
                return
        moved[key] = len(self._tiers)

    def _make_room(self, number: int, key: K) -> list[K] | None:
        """Remove chunks from the tier to make room for `key`, and return them. Return None and change nothing
        if a chunk that would have to leave is as strong as `key`.
        """
        tier, use = self._tiers[number], self._uses[key]
        if use.size_bytes > tier.capacity_bytes:
            return None
        displaced: list[K] = []
        while tier.used_bytes + use.size_bytes > tier.capacity_bytes:
            weakest = tier.ranking.weakest(self._score_of)
            assert weakest is not None, "a full tier holds a chunk"
            if self._score_of(weakest) >= self._score_against(weakest, key):
                for kept in displaced:
                    tier.add(kept, self._score_of(kept), self._uses[kept].size_bytes)
                return None
            tier.remove(weakest, self._uses[weakest].size_bytes)
            displaced.append(weakest)
        return displaced
