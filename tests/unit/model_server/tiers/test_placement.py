"""Row 002-4: which chunks the fast tiers keep."""

from __future__ import annotations

import random

import pytest

from model_server.tiers.placement import (
    SCORES,
    ChunkUse,
    Score,
    TieredPlacement,
    by_product,
    by_uses_and_importance,
)


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
