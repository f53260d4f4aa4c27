"""Reports which nodes the fast tiers hold as a whole, whenever this changes.

A node is reported when all its chunks of all layers are in a fast tier, and again when the first of these
chunks leaves. This module does no I/O. Caller: the tiered reader, in its own thread.

Invariants (`check_integrity`, with the chunks that are held): each count is the number of held chunks; the
reported nodes are exactly those that are held as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from model_server.tiers.events import Tell, TierRemoved, TierStored, to_nobody
from model_server.tiers.segment import KvLayout, Segment


class NodeReports:
    def __init__(self, layout: KvLayout) -> None:
        self.tell: Tell = to_nobody
        self._layout = layout
        self._held: Counter[Segment] = Counter()

    def add(self, segment: Segment) -> None:
        """Note that a chunk of the node's segment has come into a fast tier."""
        self._held[segment] += 1
        if self._is_whole(segment):
            self._tell_stored(segment)

    def remove(self, segment: Segment) -> None:
        """Note that a chunk of the node's segment has left the fast tiers."""
        if self._is_whole(segment):
            self.tell(TierRemoved("CPU", segment.place.hashes))
        self._held[segment] -= 1
        if not self._held[segment]:
            del self._held[segment]

    def tell_all(self) -> None:
        for segment in filter(self._is_whole, self._held):
            self._tell_stored(segment)

    def check_integrity(self, held: Iterable[Segment]) -> None:
        assert self._held == Counter(held)
        assert all(count <= self._whole(segment) for segment, count in self._held.items())

    def _whole(self, segment: Segment) -> int:
        return self._layout.num_layers * (1 + self._layout.num_chunks(segment.num_tokens))

    def _is_whole(self, segment: Segment) -> bool:
        return self._held[segment] == self._whole(segment)

    def _tell_stored(self, segment: Segment) -> None:
        place = segment.place
        self.tell(TierStored("CPU", place.hashes, place.first_block, place.parent))
