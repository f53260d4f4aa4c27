"""The policies that decide which free block with cached content is evicted first.

- `lru`: a free queue evicts the block that was freed first. The blocks of a sequence are freed tail first, so
  the longest prefix of a sequence is evicted first;
- `last-touch`: evicts by the step of last use, then the longest prefix first. It is a heap of heaps: the
  outer heap orders steps, and each step has an inner heap that orders prefixes. The policy differs from `lru`
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

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Literal, get_args

from model_server.core.blocks import Block
from model_server.core.free_queue import FreeOrder, LinkedQueue

EvictionName = Literal["lru", "last-touch", "lfu", "lfu-ageing"]
EVICTION_NAMES: tuple[EvictionName, ...] = get_args(EvictionName)

_SLACK_ENTRIES = 64
"""Up to this number of stale entries, a heap is not rebuilt, since a rebuild would save little."""


def make_order(eviction: EvictionName) -> FreeOrder:
    """Return the order of a policy. Raise ValueError if no policy has this name."""
    match eviction:
        case "lru":
            return LinkedQueue()
        case "last-touch":
            return LastTouchThenLongest()
        case "lfu":
            return LeastFrequentlyUsed()
        case "lfu-ageing":
            return LeastFrequentlyUsed(ageing=True)
        case _:  # The name comes from a command line or a file, so the type does not guarantee it.
            raise ValueError(
                f"unknown eviction policy {eviction!r}; choose one of {', '.join(EVICTION_NAMES)}"
            )


class LastTouchThenLongest:
    """A heap of heaps: the outer heap holds each step that has free blocks once, and the inner heaps hold
    (-prefix, age, block).
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._inner: dict[int, list[tuple[int, int, Block]]] = {}
        self._entry_of: dict[Block, tuple[int, int]] = {}
        """Step and age of the valid entry of each block."""
        self._ages = count()
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Block]:
        for step in sorted(self._inner):
            yield from (
                block for _, age, block in sorted(self._inner[step]) if self._is_valid(step, age, block)
            )

    def append(self, block: Block) -> None:
        assert block not in self._entry_of, "the block is in the pool already"
        self._push(block.last_use, next(self._ages), block)

    def remove(self, block: Block) -> None:
        del self._entry_of[block]
        if self._num_entries > 2 * len(self._entry_of) + _SLACK_ENTRIES:
            self._rebuild()

    def pop_first(self) -> Block:
        assert self._entry_of, "no free block is left"
        while True:
            step = self._steps[0]
            inner = self._inner[step]
            _, age, block = heapq.heappop(inner)
            self._num_entries -= 1
            if not inner:
                heapq.heappop(self._steps)
                del self._inner[step]
            if self._is_valid(step, age, block):
                del self._entry_of[block]
                return block

    def check_integrity(self) -> None:
        assert sorted(self._steps) == sorted(self._inner)
        assert all(self._inner.values()), "a step without entries stayed"
        assert self._num_entries == sum(map(len, self._inner.values()))
        assert set(self) == self._entry_of.keys()
        assert len(list(self)) == len(self._entry_of)

    def _push(self, step: int, age: int, block: Block) -> None:
        if step not in self._inner:
            self._inner[step] = []
            heapq.heappush(self._steps, step)
        heapq.heappush(self._inner[step], (-block.prefix_blocks, age, block))
        self._entry_of[block] = (step, age)
        self._num_entries += 1

    def _is_valid(self, step: int, age: int, block: Block) -> bool:
        return self._entry_of.get(block) == (step, age)

    def _rebuild(self) -> None:
        kept = list(self._entry_of.items())
        self._steps, self._inner, self._entry_of, self._num_entries = [], {}, {}, 0
        for block, (step, age) in kept:
            self._push(step, age, block)


class LeastFrequentlyUsed:
    """One heap of (count, last use, -prefix, age, block). The count is uses, plus `_floor` with ageing."""

    def __init__(self, *, ageing: bool = False) -> None:
        self._ageing = ageing
        self._floor = 0
        self._heap: list[tuple[int, int, int, int, Block]] = []
        self._age_of: dict[Block, int] = {}
        self._ages = count()

    def __len__(self) -> int:
        return len(self._age_of)

    def __iter__(self) -> Iterator[Block]:
        return (block for *_, age, block in sorted(self._heap) if self._age_of.get(block) == age)

    def append(self, block: Block) -> None:
        assert block not in self._age_of, "the block is in the pool already"
        age = self._age_of[block] = next(self._ages)
        heapq.heappush(
            self._heap, (self._floor + block.uses, block.last_use, -block.prefix_blocks, age, block)
        )

    def remove(self, block: Block) -> None:
        del self._age_of[block]
        if len(self._heap) > 2 * len(self._age_of) + _SLACK_ENTRIES:
            self._heap = [entry for entry in self._heap if self._age_of.get(entry[-1]) == entry[-2]]
            heapq.heapify(self._heap)

    def pop_first(self) -> Block:
        assert self._age_of, "no free block is left"
        while True:
            uses, *_, age, block = heapq.heappop(self._heap)
            if self._age_of.get(block) == age:
                del self._age_of[block]
                if self._ageing:
                    self._floor = uses
                return block

    def check_integrity(self) -> None:
        assert set(self) == self._age_of.keys()
        assert len(list(self)) == len(self._age_of)
