"""The radix tree of stored prefixes, compared with a plain set of prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from model_server.core.hashing import BlockHash
from model_server.tiers.nodes import Node, PrefixTree
from tests.harness.engine_requests import block_hashes_of


def pairs(tokens: Sequence[int]) -> list[BlockHash]:
    """Return the hashes of blocks of two tokens."""
    return block_hashes_of(tokens, block_tokens=2, algorithm="sha256_cbor")


def insert(tree: PrefixTree, hashes: Sequence[BlockHash]) -> Node | None:
    """Add the missing blocks, as the store does. Return the new node."""
    found = tree.match(hashes)
    covered = sum(match.num_blocks for match in found)
    parent = hashes[covered - 1] if covered else None
    return (
        tree.attach(hashes[covered:], first_block=covered, parent_hash=parent) if hashes[covered:] else None
    )


def test_a_prefix_is_found_as_far_as_any_stored_prefix_shares_it() -> None:
    rng = random.Random(1)
    tree = PrefixTree()
    known: set[BlockHash] = set()
    for _ in range(300):
        hashes = pairs([rng.randrange(2) for _ in range(2 * rng.randrange(1, 8))])
        expected = sum(block in known for block in hashes)
        assert sum(match.num_blocks for match in tree.match(hashes)) == expected
        insert(tree, hashes)
        tree.check_integrity()
        known.update(hashes)
    assert sum(len(node.hashes) for node in tree) == len(known)


def test_a_prefix_that_leaves_in_the_middle_follows_that_block() -> None:
    tree = PrefixTree()
    one, other = pairs([1, 2, 3, 4, 5, 6]), pairs([1, 2, 9, 9])
    insert(tree, one)
    added = insert(tree, other)
    assert added is not None
    assert (added.hashes, added.first_block, added.parent_hash) == (tuple(other[1:]), 1, one[0])
    assert [(match.node.name, match.num_blocks) for match in tree.match(other)] == [
        (one[0], 1),
        (other[1], 1),
    ]
    assert [match.num_blocks for match in tree.match(one)] == [3], "the node that it left stays whole"
    tree.check_integrity()


def test_removed_leaves_can_be_inserted_again_at_their_place() -> None:
    tree = PrefixTree()
    one, longer = pairs([1, 2, 3, 4]), pairs([1, 2, 3, 4, 5, 6])
    insert(tree, one)
    leaf = insert(tree, longer)
    assert leaf is not None
    tree.remove(leaf)
    tree.check_integrity()
    assert len(tree) == 1
    assert tree.attach(leaf.hashes, first_block=2, parent_hash=one[1]) is not None
    assert tree.attach(leaf.hashes, first_block=2, parent_hash=one[1]) is None, "the node is in the tree"
    assert tree.attach([BlockHash(b"x")], first_block=3, parent_hash=BlockHash(b"away")) is None
    assert tree.attach([BlockHash(b"x")], first_block=3, parent_hash=None) is None
    tree.check_integrity()
    assert sum(match.num_blocks for match in tree.match(longer)) == 3
