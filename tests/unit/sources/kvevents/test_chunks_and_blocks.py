"""Chunks have the blocks that become complete in them. Both are bounded, and go in small steps."""

import random
from collections.abc import Sequence

from epp.base.types import ChunkHash, EndpointName
from epp.sources.kvevents.decoding import BlockName, Cleared, Removed, Stored
from epp.sources.kvevents.exact import Exact
from epp.sources.kvevents.knowledge import ByBlock, ChunkTree, MappedPrompt, Node
from tests.harness.steps import steps
from tests.invariants.kvevents import check_exact, check_tree, nodes_of

A = EndpointName("a")


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
    check_tree(tree)


def test_ends_of_the_chains_that_were_not_mapped_for_longest_time_go_first() -> None:
    tree = ChunkTree(max_chunks=3)
    tree.map(mapped([1, 2], [71, 72], [1, 2]))
    tree.map(mapped([5], [75], [1]))
    tree.map(mapped([1, 3], [71, 73], [1, 2]))
    assert {node.chunk for node in nodes_of(tree)} == {1, 3, 5}
    tree.map(mapped([6], [76], [1]))
    assert {node.chunk for node in nodes_of(tree)} == {1, 3, 6}
    assert tree.users(BlockName(72)) == ()
    check_tree(tree)


def test_a_server_that_lets_all_blocks_go_loses_the_start_of_each_chain() -> None:
    exact = Exact({}, max_blocks=10**6, max_chunks=100)
    exact.add(A, model="m")
    exact.learn(A, Stored(tuple(BlockName(n) for n in range(71, 76))), now=1.0)
    exact.look_up(mapped([1, 2, 3], [71, 72, 73], [1, 2, 3]), now=2.0)
    exact.look_up(mapped([1, 4], [71, 74], [1, 2]), now=3.0)
    assert len(exact.findings(now=9.0)) == 2
    exact.learn(A, Cleared(), now=4.0)
    (loss,) = exact.findings(now=9.0)
    assert (loss.chain, loss.at) == ([1], 4.0)
    assert exact.num_blocks == 0
    check_exact(exact)


def test_a_chain_that_loses_every_second_block_is_one_loss() -> None:
    exact, names = Exact({}, max_blocks=10**6, max_chunks=5_000), [BlockName(n) for n in range(4_000)]
    exact.add(A, model="m")
    exact.learn(A, Stored(tuple(names)), now=1.0)
    exact.look_up(mapped(range(4_000), names, range(1, 4_001)), now=2.0)
    exact.findings(now=9.0)
    exact.learn(A, Removed(tuple(names[::-2])), now=3.0)
    (loss,) = exact.findings(now=9.0)
    assert (loss.chain, loss.at) == ([0, 1], 3.0)


def test_looking_for_losses_takes_time_in_proportion_to_the_chunks() -> None:
    """A chain of 200 chunks with 200 ends loses all ends, and its first chunk too or not."""
    for losses in (1, 200):
        exact, names = Exact({}, max_blocks=10**6, max_chunks=1_000), [BlockName(n) for n in range(400)]
        exact.add(A, model="m")
        exact.learn(A, Stored(tuple(names)), now=1.0)
        for end in range(200, 400):
            path = [*range(200), end]
            exact.look_up(mapped(path, [names[n] for n in path], range(1, 202)), now=2.0)
        exact.findings(now=9.0)
        exact.learn(A, Removed(tuple(names[200:] + names[: losses == 1])), now=3.0)
        found: list[Node] = []
        assert steps(lambda: found.extend(exact.known[A].lost())) < 20 * 400  # noqa: B023
        assert len(found) == losses


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
