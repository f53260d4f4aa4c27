"""Rows 002-2 and 002-3: the threshold of similarity, and the order in which a node's tokens are stored."""

import random

import pytest

from model_server.tiers.layout import TokenOrder
from model_server.tiers.settings import EVERY_CHUNK, SelectionSettings
from model_server.tiers.similarity import by_chance, jaccard, mean_jaccard, threshold


def test_002_2_random_sets_are_as_similar_as_the_formula_says() -> None:
    rng = random.Random(1)
    for kept in (64, 96, 128, 192):
        sets = [set(rng.sample(range(384), kept)) for _ in range(40)]
        assert mean_jaccard(sets) == pytest.approx(by_chance(kept, 384), abs=0.01)


@pytest.mark.parametrize(("kept", "expected"), [(96, 0.311), (192, 0.517), (384, 1.0)])
def test_002_2_the_threshold_is_chance_to_the_power_alpha(kept: int, expected: float) -> None:
    assert threshold(kept, 384) == pytest.approx(expected, abs=5e-4)
    assert threshold(kept, 384) >= by_chance(kept, 384)


def test_002_2_similarity_is_the_share_of_common_elements() -> None:
    assert jaccard({1, 2, 3}, {2, 3, 4}) == 0.5
    assert jaccard(set(), set()) == 1
    assert mean_jaccard([{1}]) == 1
    assert mean_jaccard([{1}, {1}, {2}]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("kept", [0, 11])
def test_a_number_of_tokens_that_cannot_be_kept_is_refused(kept: int) -> None:
    with pytest.raises(ValueError, match="10 tokens"):
        threshold(kept, 10)


def test_002_3_the_documents_example_has_its_mapping_list() -> None:
    order = TokenOrder.by_importance([5.0, 0.0, 0.0, 4.0])
    assert order.stored() == [0, 3, 1, 2]
    assert order.slots == (0, 2, 3, 1)


def test_002_3_bytes_are_equal_after_the_order_is_undone() -> None:
    rng = random.Random(2)
    for num_tokens in (1, 7, 64):
        order = TokenOrder.by_importance([rng.random() for _ in range(num_tokens)])
        order.check_integrity()
        records = rng.randbytes(num_tokens * 12)
        stored = order.pack(records, record_bytes=12)
        assert order.unpack(stored, record_bytes=12) == records
        for token, slot in enumerate(order.slots):
            assert stored[slot * 12 : slot * 12 + 12] == records[token * 12 : token * 12 + 12]


def test_002_8_choices_that_count_chunks_are_kept_under_their_own_hash() -> None:
    assert SelectionSettings(ratio=0.25, chunk_share=EVERY_CHUNK).cache_key == "sel:0.25"
    assert SelectionSettings(ratio=0.25).cache_key == "sel:0.25:0.98"
    settings = [
        SelectionSettings(),
        SelectionSettings(ratio=0.25),
        SelectionSettings(chunk_share=0.9),
        SelectionSettings(probe_heads=2),
        SelectionSettings(alpha=0.5),
    ]
    assert len({each.cache_key for each in settings}) == len(settings), "another choice gives another hash"
    for share in (0.0, 1.01):
        with pytest.raises(ValueError, match="chunk_share"):
            SelectionSettings(chunk_share=share)
