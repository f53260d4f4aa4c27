"""Every order of eviction is compared with a sorted list, also the lazy queue of row 001-4."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from model_server.core.block_pool import BlockPool
from model_server.core.blocks import Block, BlockId
from model_server.core.eviction import EvictionName, make_order
from model_server.core.free_queue import FreeOrder, LinkedQueue
from model_server.core.hashing import BlockHash
from tests.harness.steps import steps

NUM_BLOCKS = 12


class LazyQueue:
    """A hit only marks the block, and marked blocks are skipped when they come to the front. A marked block
    that is freed again has to leave its old place first, which is O(n).

    Invariant: every marked block has exactly one entry, which is stale. Every free block has exactly one
    entry that is not stale.
    """

    __slots__ = ("_entries", "_marked", "passed")

    def __init__(self) -> None:
        self._entries: deque[Block] = deque()
        self._marked: set[Block] = set()
        self.passed = 0

    def __len__(self) -> int:
        return len(self._entries) - len(self._marked)

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self._entries if block not in self._marked)

    def append(self, block: Block) -> None:
        if block in self._marked:
            self.passed += self._entries.index(block)
            self._entries.remove(block)
            self._marked.remove(block)
        self._entries.append(block)

    def remove(self, block: Block) -> None:
        assert block not in self._marked, "the block is not in the queue"
        self._marked.add(block)

    def pop_first(self) -> Block:
        assert len(self), "no free block is left"
        while (block := self._entries.popleft()) in self._marked:
            self._marked.remove(block)
        return block


# A list of operations on an order: (what, which of the blocks that fit, last use, uses, prefix).
operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "remove", "pop"]),
        st.integers(0, NUM_BLOCKS - 1),
        st.integers(0, 3),
        st.integers(1, 3),
        st.integers(1, 4),
    ),
    max_size=120,
)

Key = Callable[[Block, int], tuple[int, ...]]
SORTED: dict[EvictionName, Key] = {
    "lru": lambda _block, age: (age,),
    "last-touch": lambda block, age: (block.last_use, -block.prefix_blocks, age),
    "lfu": lambda block, age: (block.uses, block.last_use, -block.prefix_blocks, age),
    "lfu-ageing": lambda block, age: (block.uses, block.last_use, -block.prefix_blocks, age),
}


@dataclass
class SortedReference:
    key: Key
    ageing: bool = False
    ages: dict[Block, int] = field(default_factory=dict)
    floors: dict[Block, int] = field(default_factory=dict)
    floor: int = 0
    next_age: int = 0

    def append(self, block: Block) -> None:
        self.ages[block] = self.next_age
        self.floors[block] = self.floor
        self.next_age += 1

    def evicted(self, block: Block) -> None:
        del self.ages[block]
        if self.ageing:
            self.floor = self.floors[block] + block.uses

    def in_order(self) -> list[Block]:
        return sorted(self.ages, key=self.rank)

    def rank(self, block: Block) -> tuple[int, ...]:
        first, *rest = self.key(block, self.ages[block])
        return (first + self.floors[block], *rest)


def run(order: FreeOrder, reference: SortedReference, steps: list[tuple[str, int, int, int, int]]) -> None:
    blocks = [Block(BlockId(i)) for i in range(NUM_BLOCKS)]
    for what, which, last_use, uses, prefix in steps:
        inside = [block for block in blocks if block in reference.ages]
        outside = [block for block in blocks if block not in reference.ages]
        if what == "append" and outside:
            block = outside[which % len(outside)]
            block.last_use, block.uses, block.prefix_blocks = last_use, uses, prefix
            order.append(block)
            reference.append(block)
        elif what == "remove" and inside:
            block = inside[which % len(inside)]
            order.remove(block)
            del reference.ages[block]
        elif what == "pop" and inside:
            block = order.pop_first()
            assert block is reference.in_order()[0]
            reference.evicted(block)
        assert list(order) == reference.in_order()
        assert len(order) == len(reference.ages)
        order.check_integrity()


def serve_requests(queue: LinkedQueue | LazyQueue, *, num_blocks: int, hit_rate: float) -> int:
    """Serve 20 requests of 64 blocks, and return the lines of Python that a request runs."""
    blocks, rng = [Block(BlockId(number)) for number in range(num_blocks)], random.Random(5)
    for block in blocks:
        queue.append(block)

    def serve() -> None:
        for _ in range(20):
            hit, start, table = rng.random() < hit_rate, int(rng.random() * (num_blocks - 64)), []
            if hit:
                table = blocks[start : start + 64]
                for block in table:
                    queue.remove(block)
            for block in reversed(table or [queue.pop_first() for _ in range(64)]):
                queue.append(block)

    return steps(serve) // 20


@pytest.mark.slow
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9])
def test_001_4_one_order_but_only_the_lazy_queue_walks(hit_rate: float) -> None:
    lines = []
    for num_blocks in (1024, 8192, 65_536):
        linked, lazy = LinkedQueue(), LazyQueue()
        lines.append(serve_requests(linked, num_blocks=num_blocks, hit_rate=hit_rate))
        serve_requests(lazy, num_blocks=num_blocks, hit_rate=hit_rate)
        assert [block.block_id for block in linked] == [block.block_id for block in lazy]
        print(f"\n001-4: {num_blocks} blocks: {lines[-1]} lines; lazy passes {lazy.passed // 20}")
    assert len(set(lines)) == 1
    assert (lazy.passed > 20 * 500_000) == (hit_rate > 0)


@pytest.mark.parametrize("name", ["lru", "last-touch", "lfu", "lfu-ageing"])
@given(steps=operations)
@settings(deadline=None, max_examples=150)
def test_000_4_evicted_blocks_are_those_of_a_sorted_list(
    name: EvictionName, steps: list[tuple[str, int, int, int, int]]
) -> None:
    run(make_order(name), SortedReference(SORTED[name], ageing=name == "lfu-ageing"), steps)


@pytest.mark.parametrize("name", ["last-touch", "lfu", "lfu-ageing"])
def test_stale_entries_after_hits_do_not_pile_up(name: EvictionName) -> None:
    order, block, other = make_order(name), Block(BlockId(0)), Block(BlockId(1))
    order.append(other)
    for step in range(10_000):
        block.last_use = step
        order.append(block)
        order.remove(block)
    order.check_integrity()
    assert sys.getrefcount(block) < 200, "each entry holds its block"
    assert order.pop_first() is other


sequences = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=25)


@given(sequences=sequences)
@settings(deadline=None)
def test_001_3_lru_freed_in_reverse_equals_last_touch(sequences: list[tuple[int, int]]) -> None:
    """vLLM frees blocks in reverse into a list. The report has a heap of heaps. Both structures give one
    order.
    """
    pools = [BlockPool(NUM_BLOCKS, order=make_order(name)) for name in ("lru", "last-touch")]
    for family, length in sequences:
        for pool in pools:
            hits = []
            for depth in range(length):
                block = pool.find(BlockHash(bytes([family, depth])))
                if block is None:
                    break
                hits.append(block)
            pool.hold(hits)
            table = [*hits, *pool.take(length - len(hits))]
            for depth in range(len(hits), length):
                pool.cache(table[depth], BlockHash(bytes([family, depth])), prefix_blocks=depth + 1)
            pool.release(table)
            pool.end_step()
            pool.check_integrity()
        assert pools[0].free_in_order() == pools[1].free_in_order()
