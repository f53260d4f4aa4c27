"""Which chunk of vLLM's offload tier is evicted first, without vLLM.
`tests/integration/test_vllm_offload_policy.py` tests the rest.
"""

from collections.abc import Sequence

from model_server.pods.vllm.offload_ranking import REMEMBERED_PER_CHUNK, USES_PER_CHUNK, OffloadRanking

SIZE_TOKENS = 32


class Tier:
    """A ranking, and the chunks that it ranks. None of them is in use."""

    def __init__(self, *, capacity_chunks: int = 4) -> None:
        self.ranking = OffloadRanking(capacity_chunks=capacity_chunks)
        self.held: set[bytes] = set()

    def use(self, names: Sequence[str], *, first: int = 0) -> None:
        """A request uses these chunks of a prompt, from chunk `first` on. Chunks that were not held are
        held now.
        """
        keys = [name.encode() for name in names]
        ends = [(first + place) * SIZE_TOKENS for place in range(1, len(keys) + 1)]
        self.ranking.observe(keys, ends_tokens=ends, counted=set())
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

    def uses(self, name: str) -> int:
        return self.ranking.num_uses(name.encode())

    def check(self) -> None:
        self.ranking.check_integrity(dict.fromkeys(self.held, True))


def test_a_use_of_a_chunk_counts_for_the_chunks_before_it() -> None:
    tier = Tier()
    tier.use(["a", "b", "c"])
    tier.use(["b", "c"], first=1)
    tier.use(["c"], first=2)
    assert [tier.uses(name) for name in "abc"] == [3, 3, 3]


def test_of_equal_uses_the_oldest_prompt_goes_first_from_its_tail() -> None:
    tier = Tier()
    tier.use(["a0", "a1"])
    tier.use(["b0", "b1"])
    assert tier.evict(4) == ["a1", "a0", "b1", "b0"]


def test_a_request_counts_once_for_a_chunk_however_often_it_is_reported() -> None:
    ranking, counted = OffloadRanking(capacity_chunks=4), set[bytes]()
    for _ in range(3):
        ranking.observe([b"a"], ends_tokens=[SIZE_TOKENS], counted=counted)
    assert ranking.num_uses(b"a") == 1


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
    assert tier.uses("a") == 2
    assert tier.evict(1) == ["a"]
    for number in range(2 * REMEMBERED_PER_CHUNK):
        tier.use([f"other {number}"])
        assert tier.evict(1) == [f"other {number}"]
    tier.use(["a"])
    assert tier.uses("a") == 1


def test_a_chunk_that_was_popular_is_evicted_before_one_that_is_now() -> None:
    tier = Tier(capacity_chunks=2)
    for _ in range(USES_PER_CHUNK):
        tier.use(["once"])
    before = tier.uses("once")
    for _ in range(2 * USES_PER_CHUNK):
        tier.use(["now"])
    assert tier.uses("once") <= before / 2
    assert tier.evict(1) == ["once"]
