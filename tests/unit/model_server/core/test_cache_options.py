"""Options of the cache: preallocation, observers, cached beginnings; row 002-8."""

import random
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.core.blocks import Block, BlockId
from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig, StepResult
from model_server.core.hashing import BlockHash
from model_server.core.kv_cache import CachedPrefix, KVCacheManager
from model_server.core.partial_cache import Beginnings, make_manager
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits, StepPlan
from model_server.runners.cost import CostModel, CostRunner
from model_server.tiers.settings import SelectionSettings
from tests.harness.engine_requests import block_ids, request_of, run_to_end


def manager_of_options(num_blocks: int, options: CacheOptions | None = None) -> KVCacheManager:
    return make_manager(
        num_blocks=num_blocks,
        block_size_tokens=16,
        enable_prefix_caching=True,
        options=options or CacheOptions(),
    )


def admit_alone(manager: KVCacheManager, request: Request) -> None:
    assert manager.allocate(request, CachedPrefix((), 0), num_new_tokens=len(request.token_ids))
    request.num_computed_tokens = len(request.token_ids)
    manager.computed(request)


def decode_if_room(manager: KVCacheManager, request: Request, token: int) -> bool:
    request.token_ids.append(TokenId(token))
    done = manager.append(request, num_new_tokens=1)
    if done:
        request.num_computed_tokens += 1
        manager.computed(request)
    manager.check_integrity()
    return done


def test_preallocated_blocks_are_used_before_new_blocks() -> None:
    manager = manager_of_options(10, CacheOptions(preallocated_blocks=2))
    request = request_of(20)
    admit_alone(manager, request)
    assert block_ids(manager, request) == [0, 1, 2, 3]
    for token in range(44):
        assert decode_if_room(manager, request, token)
    assert block_ids(manager, request) == [0, 1, 2, 3]
    assert decode_if_room(manager, request, 99)
    assert block_ids(manager, request) == [0, 1, 2, 3, 4, 5, 6]
    manager.free(request)
    manager.check_integrity()
    # Blocks that were never filled go first, the tail before the rest. Blocks that were never used come
    # next, and blocks that can be found again come last.
    assert manager.pool.free_in_order() == [6, 5, 4, 7, 8, 9, 3, 2, 1, 0]


def test_preallocation_takes_only_blocks_that_are_left_over() -> None:
    manager = manager_of_options(3, CacheOptions(preallocated_blocks=5))
    request = request_of(32)
    admit_alone(manager, request)
    assert block_ids(manager, request) == [0, 1, 2]
    other = request_of(8, first=500)
    assert not manager.allocate(other, manager.get_computed(other), num_new_tokens=8)
    manager.check_integrity()


def test_blocks_over_the_bound_on_unused_blocks_are_emptied_and_not_lost() -> None:
    manager = manager_of_options(10, CacheOptions(max_unused_blocks=2))
    request = request_of(80)
    admit_alone(manager, request)
    manager.free(request)
    manager.check_integrity()
    assert (manager.pool.num_unused, manager.pool.num_free) == (2, 10)
    assert manager.get_computed(request_of(80)).num_tokens == 32


@pytest.mark.parametrize(
    "wrong",
    [
        {"hash_algorithm": "md5"},
        {"eviction": "fifo"},
        {"preallocated_blocks": -1},
        {"max_unused_blocks": -1},
    ],
)
def test_invalid_options_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"|".join(str(part) for item in wrong.items() for part in item)):
        CacheOptions(**wrong)  # type: ignore[arg-type]  # as from a command line


SIZE = 4


class ConstantRunner:
    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([TokenId(7) if chunk.samples else None for chunk in plan.chunks], 1.0)


class Mirror:
    """The copies of each hash, known only from what the observer hears."""

    def __init__(self) -> None:
        self.copies: Counter[BlockHash] = Counter()
        self.spans: list[tuple[int, int]] = []

    def stored(self, request: Request, *, first: int, end: int) -> None:
        assert 0 <= first < end <= len(request.block_hashes)
        assert end * SIZE <= len(request.token_ids)
        self.spans.append((first, end))
        self.copies.update(request.block_hashes[first:end])

    def removed(self, block_hash: BlockHash) -> None:
        self.copies[block_hash] -= 1
        assert self.copies[block_hash] >= 0

    def cleared(self) -> None:
        self.copies.clear()


def constant_engine(num_blocks: int) -> Engine:
    limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=16)
    config = EngineConfig(
        num_blocks=num_blocks, block_size_tokens=SIZE, eos_token_id=TokenId(0), limits=limits
    )
    return Engine(config, ConstantRunner())


def cached_hashes(engine: Engine) -> Counter[BlockHash]:
    return Counter(b.block_hash for b in engine.kv_cache.pool.blocks if b.block_hash is not None)


def test_a_block_of_prompt_or_answer_is_reported_when_it_is_full() -> None:
    engine, mirror = constant_engine(20), Mirror()
    engine.kv_cache.observer = mirror
    run_to_end(engine, request_of(9, name="a", max_tokens=5))
    assert mirror.spans == [(0, 2), (2, 3)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_after_any_events_the_mirror_holds_each_hash_as_often_as_the_cache(
    actions: list[tuple[str, int, int]],
) -> None:
    engine, mirror = constant_engine(12), Mirror()
    engine.kv_cache.observer = mirror
    added, now = 0, 0.0
    for action, first, second in actions:
        match action:
            case "add":
                engine.add(request_of(first, name=str(added), max_tokens=second))
                added += 1
            case "step" if engine.num_unfinished:
                _, now = engine.step(now=now)
            case "abort":
                engine.abort(RequestId(str(first)))
            case "reset":
                engine.kv_cache.reset_prefix_cache()
        assert +mirror.copies == cached_hashes(engine)


class ComparedToken(int):
    """A token that counts how often it is compared."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        ComparedToken.comparisons += 1
        return int.__eq__(self, int(other))  # type: ignore[call-overload]  # tokens alone are compared here

    def __lt__(self, other: int) -> bool:
        ComparedToken.comparisons += 1
        return int.__lt__(self, int(other))

    __hash__ = int.__hash__


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["look up", "add"])
def test_sixteen_times_as_many_blocks_take_only_a_few_more_comparisons(kind: str) -> None:
    worst = {}
    for number in (500, 8000):
        rng, index = random.Random(3), Beginnings()

        def block_of(rng: random.Random = rng) -> tuple[TokenId, ...]:
            return tuple(TokenId(ComparedToken(token)) for token in (7, *rng.choices(range(50_000), k=14)))

        for block_id in range(number):
            index.add(block_of(), Block(BlockId(block_id)))
        worst[number] = 0
        for block_id in range(number, number + 50):
            tokens = block_of()
            ComparedToken.comparisons = 0
            if kind == "look up":
                index.longest(tokens)
            else:
                index.add(tokens, Block(BlockId(block_id)))
            worst[number] = max(worst[number], ComparedToken.comparisons)
    print(f"\n{kind}: at most {worst[500]} comparisons of tokens at 500 blocks, {worst[8000]} at 8,000")
    assert worst[500] < 120
    assert worst[8000] <= 1.6 * worst[500]  # a scan takes 16 times as many


PROMPT = [TokenId(token) for token in range(100, 164)]
SELECTIVE = SelectionSettings(ratio=0.25).cache_key


def add_request(
    engine: Engine, name: str, *, approximation: str = "", prompt: list[TokenId] = PROMPT
) -> Request:
    request = Request(RequestId(name), list(prompt), max_tokens=2, arrival_s=0.0, approximation=approximation)
    run_to_end(engine, request)
    return request


def test_002_8_no_exact_request_and_no_event_names_approximate_blocks() -> None:
    config = EngineConfig(num_blocks=12, block_size_tokens=16, eos_token_id=NO_TOKEN)
    engine = Engine(config, CostRunner(CostModel(), max_loras=1, next_token=lambda _: TokenId(7)))
    mirror = engine.kv_cache.observer = Mirror()
    selective = add_request(engine, "selective", approximation=SELECTIVE)
    assert not mirror.copies
    assert add_request(engine, "exact").num_cached_tokens == 0
    assert add_request(engine, "exact again").num_cached_tokens == 48
    assert add_request(engine, "selective again", approximation=SELECTIVE).num_cached_tokens == 48
    assert add_request(engine, "another ratio", approximation="sel:0.5").num_cached_tokens == 0
    for turn in range(4):
        add_request(engine, str(turn), prompt=[TokenId(1000 * turn + token) for token in range(1, 161)])
    assert 0 in mirror.copies.values(), "the pool is small, so blocks were removed"
    assert set(selective.block_hashes).isdisjoint(mirror.copies)
