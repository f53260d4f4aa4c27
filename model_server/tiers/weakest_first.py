"""Keeps keys in the order of their scores, weakest first, in a min-heap whose entries are updated only when
they come to the top.

A rising score, such as that of a used chunk, costs nothing until its key appears as the weakest. A falling
score must be reported with `lowered`. Of keys with equal scores, the key that was added first comes first.

Invariants (`check_integrity`): every key has a heap entry, and no entry is above the key's score.

This module does no I/O. Callers: the placement of chunks in tiers, the ranking of chunks in vLLM's offload
tier.
"""

import heapq
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Ordered)


class WeakestFirst(Generic[K, S]):
    def __init__(self) -> None:
        self.filed: dict[K, S] = {}
        """The score under which each key is in the heap. The key's own score may have risen since."""
        self._heap: list[tuple[S, int, K]] = []
        self._entries = 0

    def file(self, key: K, score: S) -> None:
        """Add a key, or give a known key another score."""
        self._entries += 1
        self.filed[key] = score
        heapq.heappush(self._heap, (score, self._entries, key))
        if len(self._heap) > 4 * len(self.filed) + 64:
            self._heap = [entry for entry in self._heap if self.filed.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def remove(self, key: K) -> None:
        del self.filed[key]

    def lowered(self, key: K, score: S) -> None:
        """Give a key whose score has fallen a new entry. A score that has risen is noticed when its key comes
        to the top.
        """
        if score < self.filed[key]:
            self.file(key, score)

    def weakest(self, score_of: Callable[[K], S]) -> K | None:
        """Return the key with the least score now, which stays in the heap. Return None if there is no
        key.
        """
        while self._heap:
            filed, _, key = self._heap[0]
            if self.filed.get(key) != filed:
                heapq.heappop(self._heap)
            elif filed < (score := score_of(key)):
                heapq.heappop(self._heap)
                self.file(key, score)
            else:
                return key
        return None

    def check_integrity(self, score_of: Callable[[K], S]) -> None:
        assert set(self.filed.items()) <= {(key, score) for score, _, key in self._heap}
        assert not any(score_of(key) < filed for key, filed in self.filed.items())
