"""The policies that decide which free block with cached content is evicted first.

- `lru`: a free queue evicts the block that was freed first. The blocks of a sequence are freed tail first, so
  the longest prefix of a sequence is evicted first;
- `last-touch`: evicts by the step of last use, then the longest prefix first. The policy differs from `lru`
  only among sequences that end in the same step;
- `lfu`: evicts the block with the fewest uses first, then by last use, then the longest prefix first. A block
  is used at least as often as the blocks that continue it, so a chain is still evicted from its tail. Old
  uses count as much as new ones, forever;
- `lfu-ageing`: as `lfu`, but old uses fade (LFU with dynamic ageing). A freed block counts its uses plus the
  count of the block that was evicted last. So a favourite that is no longer used is passed by newer blocks.

A block that leaves the middle of a heap leaves a stale entry behind. The entry is dropped when it comes to
the top. A heap is rebuilt when its stale entries outnumber the others. Invariant (`check_integrity`): each
free block has exactly one entry that is not stale.

Callers: the block pool.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal, get_args

from model_server.core.blocks import Block
from model_server.core.free_queue import FreeOrder, LinkedQueue

EvictionName = Literal["lru", "last-touch", "lfu", "lfu-ageing"]
EVICTION_NAMES: tuple[EvictionName, ...] = get_args(EvictionName)

_SLACK_ENTRIES = 64
"""Up to this number of stale entries, a heap is not rebuilt, since a rebuild would save little."""


def make_order(eviction: EvictionName) -> FreeOrder:
    """Return the order of a policy."""
    match eviction:
        case "lru":
            return LinkedQueue()
        case "last-touch":
            return Heap(lambda block: (0, block.last_use, -block.prefix_blocks))
        case "lfu":
            return Heap(_by_uses)
        case "lfu-ageing":
            return Heap(_by_uses, ageing=True)


_Key = tuple[int, int, int]


def _by_uses(block: Block) -> _Key:
    return block.uses, block.last_use, -block.prefix_blocks


class Heap:
    """One heap of (key of the block, age, block). With ageing the first number of the key counts from that of
    the block that was evicted last.
    """

    def __init__(self, key: Callable[[Block], _Key], *, ageing: bool = False) -> None:
        self._key = key
        self._ageing = ageing
        self._floor = 0
        self._heap: list[tuple[_Key, int, Block]] = []
        self._age_of: dict[Block, int] = {}
        self._ages = count()

    def __len__(self) -> int:
        return len(self._age_of)

    def __iter__(self) -> Iterator[Block]:
        return (block for _, age, block in sorted(self._heap) if self._age_of.get(block) == age)

    def append(self, block: Block) -> None:
        assert block not in self._age_of, "the block is in the pool already"
        age = self._age_of[block] = next(self._ages)
        first, then, last = self._key(block)
        heapq.heappush(self._heap, ((self._floor + first, then, last), age, block))

    def remove(self, block: Block) -> None:
        del self._age_of[block]
        if len(self._heap) > 2 * len(self._age_of) + _SLACK_ENTRIES:
            self._heap = [entry for entry in self._heap if self._age_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop_first(self) -> Block:
        assert self._age_of, "no free block is left"
        while True:
            key, age, block = heapq.heappop(self._heap)
            if self._age_of.get(block) == age:
                del self._age_of[block]
                if self._ageing:
                    self._floor = key[0]
                return block

    def check_integrity(self) -> None:
        assert set(self) == self._age_of.keys()
        assert len(list(self)) == len(self._age_of)
