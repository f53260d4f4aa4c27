"""The tree of chunks: each chunk has the blocks that become complete in it, within a bound."""

from __future__ import annotations

from collections.abc import Sequence

from epp.base.types import ChunkHash
from epp.sources.kvevents.block_hashes import BlockName
from epp.sources.kvevents.chunks import ChunkTree, MappedPrompt


def mapped(chain: Sequence[int], blocks: Sequence[int], ends: Sequence[int]) -> MappedPrompt:
    return MappedPrompt(
        chain=[ChunkHash(chunk) for chunk in chain],
        blocks=[BlockName(block) for block in blocks],
        ends_blocks=ends,
    )


def test_chunk_keeps_its_first_prefix_when_another_prefix_has_same_hash() -> None:
    tree = ChunkTree(max_chunks=100)
    first = tree.map(mapped([1, 9], [71, 72], [1, 2]))
    path = tree.map(mapped([2, 9], [81, 82], [1, 2]))
    assert [node.chunk for node in path] == [2]
    assert first[1].blocks == (72,)
    tree.check_integrity()


def test_ends_of_the_chains_that_were_not_mapped_for_longest_time_go_first() -> None:
    tree = ChunkTree(max_chunks=3)
    tree.map(mapped([1, 2], [71, 72], [1, 2]))
    tree.map(mapped([5], [75], [1]))
    tree.map(mapped([1, 3], [71, 73], [1, 2]))
    tree.evict()
    assert {node.chunk for node in tree} == {1, 3, 5}
    tree.map(mapped([6], [76], [1]))
    tree.evict()
    assert {node.chunk for node in tree} == {1, 3, 6}
    assert tree.users(BlockName(72)) == ()
    tree.check_integrity()
