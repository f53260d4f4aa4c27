"""Which chunk of vLLM's offload tier is evicted first, without vLLM.
`tests/integration/test_vllm_offload_policy.py` tests the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from model_server.vllm.important_tokens import (
    MAX_RANGES,
    ImportantTokens,
    ImportantTokensError,
    important_tokens,
)
from model_server.vllm.offload_ranking import (
    REMEMBERED_PER_CHUNK,
    USES_PER_CHUNK,
    OffloadRanking,
    RequestUses,
)

SIZE_TOKENS = 32


class Tier:
    """A ranking, and the chunks that it ranks. None of them is in use."""

    def __init__(self, *, capacity_chunks: int = 4) -> None:
        self.ranking = OffloadRanking(capacity_chunks=capacity_chunks)
        self.held: set[bytes] = set()

    def use(self, names: Sequence[str], *, first: int = 0, important: ImportantTokens | None = None) -> None:
        """A request uses these chunks of a prompt, from chunk `first` on. Chunks that were not held are
        held now.
        """
        keys = [name.encode() for name in names]
        ends = [(first + place) * SIZE_TOKENS for place in range(1, len(keys) + 1)]
        self.ranking.observe(keys, ends_tokens=ends, request=RequestUses(important))
        for key in keys:
            if key not in self.held:
                self.held.add(key)
                self.ranking.insert(key)
                self.ranking.unpin(key)
        self.check()

    def evict(self, count: int, *, spared: Sequence[str] = ()) -> list[str] | None:
        taken = self.ranking.take_weakest(count, spared={name.encode() for name in spared})
        self.held -= set(taken or ())
        self.check()
        return None if taken is None else [key.decode() for key in taken]

    def score(self, name: str) -> float:
        return self.ranking.score(name.encode())

    def check(self) -> None:
        self.ranking.check_integrity(dict.fromkeys(self.held, True))


def told(*ranges: tuple[int, int]) -> ImportantTokens:
    return ImportantTokens(ranges)


def test_without_importance_the_score_is_the_number_of_tokens_times_uses() -> None:
    tier = Tier()
    tier.use(["a", "b"])
    tier.use(["a"])
    assert (tier.score("a"), tier.score("b")) == (2 * SIZE_TOKENS, SIZE_TOKENS)


def test_importance_is_the_mean_over_the_requests_that_stated_it() -> None:
    tier = Tier()
    tier.use(["a"], important=told((0, 8)))
    tier.use(["a"])
    tier.use(["a"], important=told((4, 8)))
    assert tier.score("a") == 3 * (8 + 4) / 2


def test_a_chunk_is_at_least_as_important_as_the_chunks_after_it() -> None:
    tier = Tier()
    tier.use(["a", "b", "c"], important=told((32, 64)))
    assert [tier.score(name) for name in "abc"] == [32, 32, 0]
    assert tier.evict(3) == ["c", "b", "a"]


def test_a_use_of_a_chunk_counts_for_those_before_it() -> None:
    tier = Tier()
    tier.use(["a", "b", "c"])
    tier.use(["b", "c"], first=1)
    tier.use(["c"], first=2)
    assert [tier.score(name) for name in "abc"] == [3 * SIZE_TOKENS] * 3


def test_among_equal_scores_the_least_recently_used_tail_goes_first() -> None:
    tier = Tier()
    tier.use(["a0", "a1"])
    tier.use(["b0", "b1"])
    assert tier.evict(4) == ["a1", "a0", "b1", "b0"]


def test_a_request_counts_once_for_a_chunk_however_often_it_is_reported() -> None:
    ranking, request = OffloadRanking(capacity_chunks=4), RequestUses()
    for _ in range(3):
        ranking.observe([b"a"], ends_tokens=[SIZE_TOKENS], request=request)
    assert ranking.score(b"a") == SIZE_TOKENS


def test_either_all_chunks_are_taken_or_none_and_the_order_stays() -> None:
    tier = Tier()
    tier.use(["a", "b"])
    tier.use(["c"])
    tier.ranking.pin(b"a")
    assert tier.ranking.take_weakest(3, spared=()) is None
    assert tier.ranking.take_weakest(2, spared={b"b"}) is None
    tier.ranking.unpin(b"a")
    assert tier.evict(2, spared=["b"]) == ["a", "c"]


def test_chunks_that_left_are_remembered_up_to_a_limit() -> None:
    tier = Tier(capacity_chunks=2)
    tier.use(["a"])
    assert tier.evict(1) == ["a"]
    tier.use(["a"])
    assert tier.score("a") == 2 * SIZE_TOKENS
    assert tier.evict(1) == ["a"]
    for number in range(2 * REMEMBERED_PER_CHUNK):
        tier.use([f"other {number}"])
        assert tier.evict(1) == [f"other {number}"]
    tier.use(["a"])
    assert tier.score("a") == SIZE_TOKENS


def test_a_once_popular_chunk_goes_before_one_that_is_popular_now() -> None:
    tier = Tier(capacity_chunks=2)
    for _ in range(USES_PER_CHUNK):
        tier.use(["once"])
    before = tier.score("once")
    for _ in range(2 * USES_PER_CHUNK):
        tier.use(["now"])
    assert tier.score("once") <= before / 2
    assert tier.evict(1) == ["once"]


def test_ranges_are_put_in_order_and_overlaps_count_once() -> None:
    found = important_tokens({"important_tokens": [[40, 50], [0, 4], [2, 8], [8, 10]], "max_load_tokens": 3})
    assert found == ImportantTokens(((0, 10), (40, 50)))
    assert [found.within(begin, begin + 32) for begin in (0, 5, 32, 64)] == [10, 5, 10, 0]
    assert found.within(8, 45) == 2 + 5


def test_an_absent_list_differs_from_an_empty_list() -> None:
    assert important_tokens({}) is None
    assert important_tokens({"important_tokens": []}) == ImportantTokens(())


@pytest.mark.parametrize(
    "said", ["all", 7, [[5, 5]], [[-1, 4]], [[1]], [["0", "4"]], [3], [[0, 1]] * (MAX_RANGES + 1)]
)
def test_anything_else_is_an_error_that_says_what_to_write(said: object) -> None:
    with pytest.raises(ImportantTokensError, match="important_tokens must"):
        important_tokens({"important_tokens": said})
