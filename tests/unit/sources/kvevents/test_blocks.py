"""The blocks of one server are kept and released in small steps, however many there are."""

from __future__ import annotations

import random

from epp.sources.kvevents.block_hashes import BlockName
from epp.sources.kvevents.blocks import ByBlock, ServerBlocks
from epp.sources.kvevents.decoding import Cleared, Stored, Tier


def blocks_of_server(count: int) -> ServerBlocks:
    blocks, rng = ServerBlocks(), random.Random(1)
    blocks.apply(Stored(tuple(BlockName(rng.getrandbits(64)) for _ in range(count)), Tier.GPU))
    return blocks


def test_blocks_are_freed_one_by_one() -> None:
    """If they were freed in one step, a million of them would hold the interpreter for 30 ms."""
    blocks = blocks_of_server(1000)
    going = iter(blocks.apply(Cleared()))
    assert len(blocks) == 1000
    gone = [next(going) for _ in range(10)]
    assert len(blocks) == 990
    assert not any(block in blocks for block in gone)
    blocks.check_integrity()
    assert len([*going]) == 990
    assert len(blocks) == 0
    blocks.check_integrity()


def test_blocks_are_spread_evenly_over_small_dictionaries() -> None:
    """One dictionary of 700,000 blocks takes 50 ms to grow."""
    found, rng = ByBlock[int](), random.Random(1)
    for n in range(100_000):
        name = BlockName(rng.getrandbits(64))
        found.part(name)[name] = n
    assert sum(map(len, found.parts)) == 100_000
    assert max(map(len, found.parts)) < 2 * 100_000 / len(found.parts)


def test_a_server_cannot_choose_names_that_all_go_into_one_dictionary() -> None:
    for step in (1, 64, 2**32, 2**54):
        found = ByBlock[int]()
        for n in range(1000):
            name = BlockName(n * step)
            found.part(name)[name] = n
        assert max(map(len, found.parts)) <= 500
