"""Row 002-4: which chunks the fast tiers keep, the tree of stored prefixes, and which nodes are reordered."""

import random
from collections.abc import Sequence

import pytest

from model_server.core.hashing import BlockHash
from model_server.tiers.learnt import Learnt
from model_server.tiers.nodes import Node, PrefixTree
from model_server.tiers.placement import (
    SCORES,
    ChunkUse,
    Score,
    TieredPlacement,
    by_product,
    by_uses_and_importance,
)
from tests.harness.engine_requests import block_hashes_of
from tests.unit.model_server.tiers.stored_prefixes import LAYOUT, chain


def by_uses(use: ChunkUse) -> float:
    return use.num_uses


def by_age(use: ChunkUse) -> float:
    return use.last_use


def test_002_4_documents_example_keeps_chunk_with_more_important_tokens() -> None:
    for score, kept in ((by_product, "B"), (by_uses, "A")):
        tiers: TieredPlacement[str] = TieredPlacement([1], score=score)
        for key, important in [("A", 1), ("B", 2)] * 2 + [("A", 1)]:
            tiers.use(key, size_bytes=1, num_important=important)
            tiers.check_integrity()
        assert tiers.tier_of(kept) == 0, score
        assert {tiers.tier_of("A"), tiers.tier_of("B")} == {0, 1}


def important_hit_rate(score: Score, *, seed: int) -> float:
    """Prefixes come by a Zipf law. Each chunk of them has few or many tokens that its requests need. A
    tenth of the chunks fits.
    """
    rng = random.Random(seed)
    num_prefixes, num_chunks = 60, 16
    important = {
        (prefix, chunk): rng.choice((1, 1, 2, 3, 12, 16))
        for prefix in range(num_prefixes)
        for chunk in range(num_chunks)
    }
    weights = [1 / (rank + 1) ** 0.9 for rank in range(num_prefixes)]
    tiers: TieredPlacement[tuple[int, int]] = TieredPlacement([32, 64], score=score)
    found = wanted = 0
    for _ in range(600):
        [prefix] = rng.choices(range(num_prefixes), weights)
        for chunk in range(num_chunks):
            tokens = important[prefix, chunk]
            tier, _ = tiers.use((prefix, chunk), size_bytes=1, num_important=tokens)
            wanted += tokens
            found += tokens if tier < tiers.num_tiers else 0
    tiers.check_integrity()
    return found / wanted


def test_002_4_random_importance_finds_more_than_lru_and_lfu() -> None:
    for seed in (1, 2):
        ours = important_hit_rate(by_product, seed=seed)
        assert ours > important_hit_rate(by_uses, seed=seed) > important_hit_rate(by_age, seed=seed)


def test_by_default_number_of_uses_decides_and_important_tokens_break_ties() -> None:
    def strength(*, uses: int, important: float) -> float:
        return by_uses_and_importance(ChunkUse(1, important, uses))

    assert strength(uses=2, important=0) > strength(uses=1, important=16), (
        "the document's rule prefers the important chunk"
    )
    assert strength(uses=2, important=3) > strength(uses=2, important=2)


def chunks_found(score: Score, *, seed: int) -> int:
    """Return how often a chunk is in a fast tier when it is read. A chunk is read whole, however many of
    its tokens are important.
    """
    rng = random.Random(seed)
    keys = range(200)
    often = [1 / (rank + 1) ** 0.9 for rank in keys]
    rng.shuffle(often)
    important = [rng.choice((1, 2, 4, 8, 16)) for _ in keys]
    tiers: TieredPlacement[int] = TieredPlacement([15, 25], score=score)
    found = 0
    for key in rng.choices(keys, often, k=3000):
        tier, _ = tiers.use(key, size_bytes=1, num_important=important[key])
        found += tier < tiers.num_tiers
    return found


def test_only_the_default_finds_as_many_chunks_as_counting_uses() -> None:
    found = {
        score: sum(chunks_found(score, seed=seed) for seed in range(8))
        for score in (by_uses_and_importance, by_uses, by_product)
    }
    assert found[by_uses_and_importance] >= 0.995 * found[by_uses]
    assert found[by_product] < 0.95 * found[by_uses]


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_002_4_each_step_of_a_random_history_keeps_the_invariants(score: Score) -> None:
    rng = random.Random(4)
    tiers: TieredPlacement[int] = TieredPlacement([30, 50], score=score)
    sizes = {key: rng.randrange(1, 12) for key in range(40)}
    tier_of: dict[int, int] = {}
    for _ in range(1500):
        key = rng.randrange(40)
        action = rng.random()
        if action < 0.8:
            found, moved = tiers.use(key, size_bytes=sizes[key], num_important=rng.randrange(9))
            assert found == tier_of.get(key, 2)
            tier_of |= moved
        elif action < 0.95:
            tiers.reweigh(key, num_important=rng.randrange(9))
        else:
            tiers.forget([key])
            tier_of.pop(key, None)
        tiers.check_integrity()
        assert all(tiers.tier_of(key) == tier_of.get(key, 2) for key in sizes), "each move was reported"
    assert 0 < tiers.resident_bytes(0) <= 30


def test_a_displaced_chunk_moves_one_tier_down_and_then_out() -> None:
    tiers: TieredPlacement[str] = TieredPlacement([1, 1], score=by_product)
    assert tiers.use("a", size_bytes=1, num_important=1) == (2, {"a": 0})
    assert tiers.use("b", size_bytes=1, num_important=2) == (2, {"b": 0, "a": 1})
    assert tiers.use("c", size_bytes=1, num_important=3) == (2, {"c": 0, "b": 1, "a": 2})
    assert [tiers.tier_of(key) for key in "cba"] == [0, 1, 2]


def test_a_chunk_that_fits_nowhere_changes_nothing() -> None:
    tiers: TieredPlacement[str] = TieredPlacement([4])
    tiers.use("small", size_bytes=4, num_important=1)
    assert tiers.use("large", size_bytes=5, num_important=9) == (1, {"large": 1})
    assert tiers.tier_of("small") == 0


def test_002_4_a_use_counts_the_tokens_that_were_important_for_it() -> None:
    """One use for four tokens and one for none count as much as two uses for two tokens each."""
    tiers: TieredPlacement[str] = TieredPlacement([1], score=by_product)
    for important in (4, 0):
        tiers.use("a", size_bytes=1, num_important=important)
    for _ in range(2):
        tiers.use("b", size_bytes=1, num_important=2)
    assert tiers.tier_of("a") == 0, "a chunk with an equal score does not replace another"
    tiers.use("b", size_bytes=1, num_important=1)
    assert tiers.tier_of("b") == 0


def test_002_4_a_request_does_not_evict_chunks_that_it_reads_next() -> None:
    """There are four equal chunks and two fit. Each request begins with the two that are not there. If
    nodes did not matter, these would evict the chunks that the request reads next.
    """
    for node, found in (("prefix", 2), (None, 0)):
        tiers: TieredPlacement[int] = TieredPlacement([2], score=by_product)
        for order in ([0, 1, 2, 3], [2, 3, 0, 1]) * 3:
            there = [tiers.use(key, size_bytes=1, num_important=3, node=node)[0] for key in order]
            tiers.check_integrity()
            assert tiers.tier_of(0) == tiers.tier_of(1)
        assert there.count(0) == found


def test_002_4_a_node_with_a_higher_score_evicts_chunks_of_another_node() -> None:
    tiers: TieredPlacement[str] = TieredPlacement([1], score=by_product)
    tiers.use("a", size_bytes=1, num_important=2, node="a")
    assert tiers.use("b", size_bytes=1, num_important=3, node="b") == (1, {"b": 0, "a": 1})


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


BLOCKS = tuple(chain(range(16)))


def weights(num_blocks: int, *, start: int = 0) -> list[list[float]]:
    """Later tokens are more important."""
    tokens = range(start * LAYOUT.block_tokens, (start + num_blocks) * LAYOUT.block_tokens)
    return [[float(layer + token) for token in tokens] for layer in range(2)]


def fresh() -> Learnt:
    return Learnt(num_layers=2, block_tokens=LAYOUT.block_tokens)


def test_a_node_is_due_after_two_requests_and_at_each_doubling() -> None:
    learnt, due_after = fresh(), []
    for request in range(1, 20):
        learnt.record(BLOCKS, weights(4))
        learnt.check_integrity()
        if (name := learnt.next_due()) is not None:
            assert name == BLOCKS[0]
            assert learnt.orders(BLOCKS) is not None
            due_after.append(request)
        assert learnt.next_due() is None, "a node is due once"
    assert due_after == [2, 4, 8, 16]


def test_a_node_with_other_blocks_starts_without_importance() -> None:
    learnt = fresh()
    learnt.record(BLOCKS[:1], weights(1))
    learnt.record(BLOCKS, weights(4))
    learnt.check_integrity()
    assert learnt.known(BLOCKS[:1]) is None
    again = learnt.known(BLOCKS)
    assert again is not None
    assert again.num_requests == 1
    orders = learnt.orders(BLOCKS)
    assert orders is not None
    assert orders[0].stored() == list(reversed(range(16)))


def test_requests_that_use_the_beginning_of_a_node_count_for_its_beginning() -> None:
    learnt = fresh()
    learnt.record(BLOCKS, weights(4))
    learnt.record(BLOCKS, [[layer + 2.0 for layer in own] for own in weights(2)])
    learnt.check_integrity()
    importance = learnt.known(BLOCKS)
    assert importance is not None
    assert list(importance.means(0)) == [*(token + 1.0 for token in range(8)), *weights(4)[0][8:]]
    assert importance.num_requests == 2
    assert learnt.next_due() == BLOCKS[0]
    with pytest.raises(ValueError, match="2 layers and at most 16 tokens"):
        importance.record(weights(5))


def test_the_importance_of_removed_nodes_is_forgotten() -> None:
    learnt = fresh()
    for _ in range(2):
        learnt.record(BLOCKS[:1], weights(1))
        learnt.record(BLOCKS[1:], weights(3))
    learnt.orders(BLOCKS[1:])
    learnt.keep([BLOCKS[0]])
    learnt.check_integrity()
    assert learnt.known(BLOCKS[1:]) is None
    assert learnt.orders(BLOCKS[1:]) is None
    assert learnt.next_due() == BLOCKS[0]
    assert learnt.next_due() is None
