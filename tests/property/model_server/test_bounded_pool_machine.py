"""The report's pool of unused blocks, under any order of eviction, against plain dictionaries."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_server.core.block_pool import BlockPool
from model_server.core.blocks import Block
from model_server.core.eviction import EVICTION_NAMES, EvictionName, make_order
from model_server.core.hashing import BlockHash

NUM_BLOCKS = 10


class BoundedPoolMachine(RuleBasedStateMachine):
    """Sequences of a few families come, hit and go. The name of a block is its family and its depth."""

    @initialize(bound=st.integers(0, 6), name=st.sampled_from(EVICTION_NAMES))
    def begin(self, bound: int, name: EvictionName) -> None:
        self.bound = bound
        self.pool = BlockPool(NUM_BLOCKS, order=make_order(name), max_unused_blocks=bound)
        self.live: list[list[Block]] = []
        self.names: dict[Block, BlockHash] = {}
        """The name under which each held block is cached."""

    @rule(family=st.integers(0, 2), length=st.integers(1, 4))
    def admit(self, family: int, length: int) -> None:
        names = [BlockHash(bytes([family, depth])) for depth in range(length)]
        hits: list[Block] = []
        for name in names:
            block = self.pool.find(name)
            if block is None:
                break
            hits.append(block)
        unused = [block for block in hits if block.ref_count == 0]
        if length - len(hits) + len(unused) > self.pool.num_free:
            return
        before = self.pool.num_unused
        self.pool.hold(hits)
        assert self.pool.num_unused == before - len(unused), "a hit leaves the pool of unused blocks"
        table = [*hits, *self.pool.take(length - len(hits))]
        for depth in range(len(hits), length):
            self.pool.cache(table[depth], names[depth], prefix_blocks=depth + 1)
        self.live.append(table)
        self.names.update(zip(table, names, strict=True))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(table)
        held = {block for other in self.live for block in other}
        self.names = {block: name for block, name in self.names.items() if block in held}

    @rule()
    def step(self) -> None:
        self.pool.end_step()

    @invariant()
    def test_000_3_unused_blocks_stay_bounded_and_held_blocks_stay(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.num_unused <= self.bound
        for block, name in self.names.items():
            assert block.ref_count > 0
            assert block.block_hash == name, "a held block was evicted"


BoundedPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
Test_000_3_pool_of_unused_blocks = pytest.mark.slow(BoundedPoolMachine.TestCase)
