"""Chunks that nearly all requests read are fetched before a request asks for them."""

from __future__ import annotations

import random

from model_server.tiers.foresight import Foresight


def test_chunks_that_nearly_all_requests_read_are_expected_in_their_layer_and_segment_alone() -> None:
    foresight = Foresight[str]()
    for request in range(10):
        foresight.record("a", 0, [0, 3, 4] if request else [0, 4])
        foresight.record("a", 1, [7] if request % 2 else [8])
    assert foresight.expected("a", 0) == [0, 3, 4]
    assert foresight.expected("a", 1) == []
    assert foresight.expected("a", 2) == []
    assert foresight.expected("b", 0) == []
    foresight.check_integrity({"a"})


def test_chunks_are_expected_only_after_a_second_request() -> None:
    foresight = Foresight[str]()
    foresight.record("a", 0, [1])
    assert foresight.expected("a", 0) == []
    foresight.record("a", 0, [1])
    assert foresight.expected("a", 0) == [1]


def test_a_segment_that_is_forgotten_starts_again() -> None:
    foresight = Foresight[str]()
    for _ in range(3):
        foresight.record("a", 0, [1])
    foresight.forget("a")
    foresight.forget("never seen")
    assert foresight.expected("a", 0) == []
    foresight.check_integrity(set())


def test_at_most_one_request_in_ten_did_not_read_an_expected_chunk() -> None:
    rng = random.Random(3)
    foresight, requests = Foresight[str](), [{c for c in range(8) if rng.random() < c / 7} for _ in range(50)]
    for chunks in requests:
        foresight.record("a", 0, sorted(chunks))
        foresight.check_integrity({"a"})
    expected = foresight.expected("a", 0)
    assert 7 in expected
    for chunk in expected:
        assert sum(chunk not in chunks for chunks in requests) <= 5
