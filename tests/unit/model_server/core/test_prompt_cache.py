"""Whole prompts are kept with their logits, and batches are made in three ways: the rows of document 003."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
from model_server.core.kv_cache import KVCacheManager
from model_server.core.prompt_cache import PromptCache
from model_server.core.prompt_engine import (
    OfflineScheduler,
    OnlineScheduler,
    OutOfBlocksError,
    PromptEngine,
    run_naive,
)
from model_server.core.request import FinishReason, Request, RequestId, TokenId
from tests.harness.engine_requests import answered_tokens
from tests.harness.engine_requests import request_of as any_request
from tests.unit.model_server.core.paged_model import PagedModel, answer_alone, greedy

request_of = functools.partial(any_request, max_tokens=5)

NO_EOS = TokenId(-1)


def engine_config(
    *, num_blocks: int = 200, block_size: int = 16, caching: bool = False, **more: object
) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=block_size,
        enable_prefix_caching=caching,
        eos_token_id=NO_EOS,
        **more,  # type: ignore[arg-type]  # keywords of the configuration
    )


def prompt_engine(model: PagedModel, config: EngineConfig, *, entries: int = 256) -> PromptEngine:
    return PromptEngine(config, model, sample=greedy, prompt_cache_entries=entries)


def run_prompts(engine: PromptEngine, *requests: Request) -> None:
    run_naive(engine, requests)
    engine.check_integrity()


def test_003_1_the_second_request_with_a_prompt_computes_no_prefill_and_answers_the_same() -> None:
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config())
    first, second = request_of(40), request_of(40)
    run_prompts(engine, first)
    assert model.num_prefills == 1
    run_prompts(engine, second)
    assert model.num_prefills == 1
    assert answered_tokens(first) == answered_tokens(second) == answer_alone(first)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    print("\n003-1: prefill calls: 1 for the first request, 0 for the second")


def test_a_prompt_is_found_only_with_equal_tokens_adapter_and_salt() -> None:
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config())
    run_prompts(engine, request_of(40, adapter="a", salt="s"))
    for stranger in (
        request_of(40),
        request_of(39, adapter="a", salt="s"),
        request_of(40, adapter="b", salt="s"),
        request_of(40, adapter="a", salt="t"),
    ):
        run_prompts(engine, stranger)
        assert answered_tokens(stranger) == answer_alone(stranger)
    assert (engine.prompt_cache.hits, engine.prompt_cache.misses, model.num_prefills) == (0, 5, 5)


@pytest.mark.slow
def test_003_2_blocks_return_to_the_pool_after_10_000_requests_under_eviction() -> None:
    rng, model = random.Random(3), PagedModel(block_size_tokens=4)
    engine = prompt_engine(model, engine_config(num_blocks=60, block_size=4), entries=10)
    online = OnlineScheduler(engine, max_batch_size=4)
    under_way: list[RequestId] = []
    refused = 0
    for number in range(10_000):
        request = request_of(
            rng.randrange(1, 20), first=100 * rng.randrange(12), max_tokens=rng.randrange(1, 6)
        )
        try:
            online.add(request)
            under_way.append(request.request_id)
        except OutOfBlocksError:
            refused += 1
        online.step()
        while len(under_way) > 4:
            online.pop(under_way.pop(rng.randrange(len(under_way))))
        if number % 200 == 0:
            engine.check_integrity()
    for request_id in under_way:
        online.pop(request_id)
    engine.check_integrity()
    assert len(engine.prompt_cache) <= 10
    assert engine.prompt_cache.hits > 100
    engine.prompt_cache.clear()
    engine.check_integrity()
    assert engine.kv_cache.pool.num_free == 60
    print(
        f"\n003-2: 10,000 requests, {engine.prompt_cache.hits} prompts found, {refused} refused, 60 of 60 blocks free"
    )


def test_003_2_the_least_recently_used_prompt_is_evicted_first() -> None:
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config(), entries=2)
    a, b, c = 0, 500, 900
    run_prompts(engine, *(request_of(20, first=first) for first in (a, b, a, c)))  # b leaves
    assert model.num_prefills == 3
    run_prompts(engine, request_of(20, first=a), request_of(20, first=c))
    assert model.num_prefills == 3
    run_prompts(engine, request_of(20, first=b))
    assert model.num_prefills == 4


def test_a_prompt_that_two_requests_computed_side_by_side_is_kept_once_and_counts_as_used() -> None:
    manager = KVCacheManager(num_blocks=20, block_size_tokens=16, enable_prefix_caching=False)
    cache = PromptCache(manager, max_entries=2)

    def computed(first: int) -> Request:
        request = request_of(20, first=first)
        assert manager.allocate(request, manager.get_computed(request), num_new_tokens=20)
        request.num_computed_tokens = 20
        return request

    kept, other, again, last = (computed(first) for first in (0, 500, 0, 900))
    for request in (kept, other, again, last):
        cache.put(request, "logits")
        cache.check_integrity()
    assert manager.num_pins == 4
    assert cache.attach(request_of(20, first=500)) is None
    assert cache.attach(request_of(20)) is not None
    manager.check_integrity()


def test_003_3_a_shared_partial_tail_is_copied_once_for_each_request_that_writes_into_it() -> None:
    model = PagedModel(block_size_tokens=64)
    engine = prompt_engine(model, engine_config(block_size=64))
    requests = [request_of(70), request_of(70)]
    offline = OfflineScheduler(engine)
    for request in requests:
        offline.add(request)
    held = [engine.kv_cache.table(request.request_id)[:] for request in requests]
    assert held[0] == held[1]  # both blocks are now shared
    offline.run()
    engine.check_integrity()
    uncached = request_of(70)
    run_prompts(
        prompt_engine(PagedModel(block_size_tokens=64), engine_config(block_size=64), entries=0), uncached
    )
    assert (
        answered_tokens(requests[0])
        == answered_tokens(requests[1])
        == answered_tokens(uncached)
        == answer_alone(uncached)
    )
    assert model.num_copies == 2
    print("\n003-3: 70 tokens, blocks of 64: one block copied for each of the two requests, same answers")


def test_003_3_a_prompt_of_whole_blocks_has_no_tail_to_copy() -> None:
    model = PagedModel(block_size_tokens=64)
    engine = prompt_engine(model, engine_config(block_size=64))
    first, second = request_of(128), request_of(128)
    run_prompts(engine, first, second)
    assert model.num_copies == 0
    assert answered_tokens(first) == answered_tokens(second) == answer_alone(first)


def test_003_4_a_full_cache_evicts_an_entry_and_frees_its_blocks() -> None:
    """The document's release reads an attribute that does not exist, so its first eviction raises."""
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config(num_blocks=20), entries=1)
    run_prompts(engine, request_of(20), request_of(20, first=500))
    assert len(engine.prompt_cache) == 1
    assert engine.kv_cache.pool.num_free == 18


def test_003_4_no_entries_means_off() -> None:
    """In the document, 0 meant that nothing was ever evicted."""
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config(num_blocks=20), entries=0)
    run_prompts(engine, request_of(20), request_of(20), request_of(20))
    assert (len(engine.prompt_cache), model.num_prefills) == (0, 3)
    assert engine.kv_cache.pool.num_free == 20
    with pytest.raises(ValueError, match="must not be negative"):
        prompt_engine(model, engine_config(), entries=-1)


def test_kept_prompts_are_evicted_if_requests_need_their_blocks() -> None:
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config(num_blocks=8))
    requests = [request_of(60, first=1000 * n, max_tokens=40) for n in range(4)]
    run_prompts(engine, *requests)
    assert all(answered_tokens(request) == answer_alone(request) for request in requests)
    engine.start(request_of(60, max_tokens=40))
    with pytest.raises(OutOfBlocksError):
        engine.start(request_of(16, max_tokens=1))
    engine.check_integrity()


def test_prompts_that_only_begin_alike_share_blocks_including_partial_blocks() -> None:
    model = PagedModel(block_size_tokens=16)
    config = engine_config(caching=True, cache=CacheOptions(partial_blocks=True))
    engine = prompt_engine(model, config, entries=0)
    first, longer = request_of(40), request_of(60)
    run_prompts(engine, first, longer)
    assert longer.num_cached_tokens == 40
    assert model.num_copies == 1  # the tail goes on with the answer of the first request
    assert answered_tokens(longer) == answer_alone(longer)


def test_each_prefill_and_each_decode_is_a_step_for_the_order_of_eviction() -> None:
    config = engine_config(num_blocks=20, caching=True, cache=CacheOptions(eviction="last-touch"))
    engine = prompt_engine(PagedModel(block_size_tokens=16), config, entries=0)
    run_prompts(engine, request_of(32, max_tokens=2), request_of(80, first=500, max_tokens=2))
    order = engine.kv_cache.pool.free_in_order()[-7:]
    assert order[:2] == [1, 0]  # the shorter sequence ended in an earlier step


def workload() -> list[Request]:
    """24 requests over 6 prompts, some of which share a beginning, with answers of different lengths."""
    rng = random.Random(8)
    kinds = [(rng.randrange(30, 75), 1000 * (n // 2)) for n in range(6)]
    return [request_of(kinds[n % 6][0], first=kinds[n % 6][1], max_tokens=1 + n % 9) for n in range(24)]


def run_offline(engine: PromptEngine, requests: Iterable[Request]) -> None:
    scheduler = OfflineScheduler(engine)
    for request in requests:
        scheduler.add(request)
    scheduler.run()


def run_online(engine: PromptEngine, requests: Iterable[Request]) -> None:
    scheduler = OnlineScheduler(engine)
    ids = []
    for request in requests:
        scheduler.add(request)
        ids.append(request.request_id)
        scheduler.step()
    while scheduler.num_unfinished:
        scheduler.step()
    assert [scheduler.pop(request_id).request_id for request_id in ids] == ids


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("entries", [0, 3, 256])
@pytest.mark.parametrize("partial", [False, True])
def test_003_6_naive_offline_online_and_continuous_give_the_same_greedy_answers(
    *, caching: bool, entries: int, partial: bool
) -> None:
    config = engine_config(caching=caching, cache=CacheOptions(partial_blocks=partial))
    expected = [answer_alone(request) for request in workload()]
    prefills = {}
    for name, mode in (("naive", run_naive), ("offline", run_offline), ("online", run_online)):
        model, requests = PagedModel(block_size_tokens=16), workload()
        engine = prompt_engine(model, config, entries=entries)
        mode(engine, requests)
        engine.check_integrity()
        assert [answered_tokens(request) for request in requests] == expected, name
        prefills[name] = model.num_prefills
    continuous, requests = Engine(config, PagedModel(block_size_tokens=16)), workload()
    for request in requests:
        continuous.add(request)
    while continuous.num_unfinished:
        continuous.step(now=0.0)
    assert [answered_tokens(request) for request in requests] == expected
    if entries == 256:
        assert set(prefills.values()) == {6}
    print(
        f"\n003-6: 24 requests, 6 prompts, {entries} entries, blocks cached: {caching}: prefills {prefills}"
    )


@pytest.mark.slow
def test_003_5_fifteen_distinct_prompts_of_64_cost_a_quarter_of_the_prefill_tokens() -> None:
    """This is document 003's load, counted in tokens instead of timed: 64 requests with prompts of
    856 tokens and answers of 16.
    """
    computed: dict[tuple[str, int], int] = {}
    for name, mode in (("offline", run_offline), ("online", run_online)):
        for entries in (0, 256):
            model = PagedModel(block_size_tokens=64)
            engine = prompt_engine(model, engine_config(num_blocks=64 * 14, block_size=64), entries=entries)
            mode(engine, [request_of(856, first=1000 * (n % 15), max_tokens=16) for n in range(64)])
            computed[name, entries] = model.computed_tokens - 64 * 15  # these are computed in decode steps
        assert computed[name, 0] == 64 * 856
        assert computed[name, 256] == 15 * 856
        assert computed[name, 256] <= computed[name, 0] / 4
        ratio = computed[name, 0] / computed[name, 256]
        print(
            f"\n003-5: {name}: prefill tokens {computed[name, 0]} -> {computed[name, 256]}, {ratio:.2f} times fewer"
        )


def test_003_6_online_gives_turns_to_at_most_eight_requests_a_step_and_to_all_in_turn() -> None:
    engine = prompt_engine(PagedModel(block_size_tokens=16), engine_config())
    scheduler = OnlineScheduler(engine)
    ids = []
    for _ in range(12):
        request = request_of(20, max_tokens=10)
        scheduler.add(request)
        ids.append(request.request_id)
    assert scheduler.step() == ids[:8]
    assert scheduler.step() == [*ids[8:], *ids[:4]]
    assert scheduler.step() == ids[4:]


def test_online_pop_ends_an_unfinished_request_and_ids_are_checked() -> None:
    engine = prompt_engine(PagedModel(block_size_tokens=16), engine_config(num_blocks=20), entries=0)
    scheduler = OnlineScheduler(engine)
    request = request_of(20, max_tokens=10)
    scheduler.add(request)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request)
    assert scheduler.pop(request.request_id).finish_reason is FinishReason.ABORT
    assert scheduler.step() == []
    assert engine.kv_cache.pool.num_free == 20
    with pytest.raises(KeyError):
        scheduler.pop(request.request_id)
    with pytest.raises(ValueError, match="the prompt has"):
        scheduler.add(request_of(20 * 16))
    with pytest.raises(ValueError, match="at least one request"):
        OnlineScheduler(engine, max_batch_size=0)


def test_the_end_token_stops_unless_ignored() -> None:
    stop = answer_alone(request_of(20))[2]
    config = EngineConfig(num_blocks=20, eos_token_id=stop)
    engine = prompt_engine(PagedModel(block_size_tokens=16), config)
    stops, goes_on = request_of(20, max_tokens=9), request_of(20, max_tokens=9)
    goes_on.ignore_eos = True
    run_prompts(engine, stops, goes_on)
    assert (stops.finish_reason, stops.num_output_tokens) == (FinishReason.STOP, 3)
    assert (goes_on.finish_reason, goes_on.num_output_tokens) == (FinishReason.LENGTH, 9)


def test_the_naive_baseline_finds_and_keeps_no_prompt() -> None:
    model = PagedModel(block_size_tokens=16)
    engine = prompt_engine(model, engine_config())
    first, second = request_of(40), request_of(40)
    run_naive(engine, [first, second], use_prompt_cache=False)
    engine.check_integrity()
    assert model.num_prefills == 2
    assert len(engine.prompt_cache) == 0
    assert answered_tokens(first) == answered_tokens(second) == answer_alone(first)
