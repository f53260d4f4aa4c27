"""The engine keeps whole prompts (rows 003-1 to 003-6)."""

import functools
import random
from dataclasses import replace

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
from model_server.core.kv_cache import KVCacheManager
from model_server.core.prompt_cache import PromptCache
from model_server.core.request import NO_TOKEN, Request, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, CostRunner
from tests.harness.engine_requests import answered_tokens, run_to_end
from tests.harness.engine_requests import request_of as any_request
from tests.unit.model_server.core.paged_model import PagedModel, answer_alone

request_of = functools.partial(any_request, max_tokens=5)

BLOCK = 4


def keeping_config(
    *, entries: int, num_blocks: int = 100, partial: bool = False, caching: bool = True, budget: int = 64
) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=BLOCK,
        enable_prefix_caching=caching,
        eos_token_id=NO_TOKEN,
        prompt_cache_entries=entries,
        cache=CacheOptions(partial_blocks=partial),
        limits=SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=8),
    )


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 8])
def test_003_1_a_kept_prompt_is_answered_without_computing_its_tokens(
    num_tokens: int, *, partial: bool, caching: bool
) -> None:
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=2, partial=partial, caching=caching), model)
    first, second = request_of(num_tokens), request_of(num_tokens)
    expected = answer_alone(first)
    run_to_end(engine, first)
    before = model.num_prefills, model.computed_tokens
    run_to_end(engine, second)
    assert answered_tokens(first) == answered_tokens(second) == expected
    assert model.num_prefills == before[0]
    assert model.computed_tokens - before[1] == second.max_tokens - 1, "the first token needs no computation"
    assert second.num_cached_tokens == num_tokens


def test_a_prompt_is_found_only_with_equal_tokens_adapter_and_salt() -> None:
    engine = Engine(keeping_config(entries=9, caching=False), PagedModel(block_size_tokens=BLOCK))
    for one in (
        request_of(9, adapter="a", salt="s"),
        request_of(9),
        request_of(10, adapter="a", salt="s"),
        request_of(9, adapter="b", salt="s"),
        request_of(9, adapter="a", salt="t"),
    ):
        expected = answer_alone(one)
        run_to_end(engine, one)
        assert answered_tokens(one) == expected
        assert one.num_cached_tokens == 0


def test_003_2_the_least_recently_used_prompt_is_evicted_first() -> None:
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=2, caching=False), model)
    a, b, c = 0, 500, 900
    prefills = []
    for first in (a, b, a, c, a, c, b):  # b leaves when c comes
        run_to_end(engine, request_of(9, first=first))
        prefills.append(model.num_prefills)
    assert prefills == [1, 2, 2, 3, 3, 3, 4]


@pytest.mark.slow
def test_003_2_all_blocks_are_free_after_10_000_requests() -> None:
    rng = random.Random(3)
    engine = Engine(keeping_config(entries=10, num_blocks=60), PagedModel(block_size_tokens=BLOCK))
    for number in range(10_000):
        prompt, first = rng.randrange(1, 20), 100 * rng.randrange(12)
        request = request_of(prompt, first=first, max_tokens=rng.randrange(1, 6))
        engine.add(request)
        engine.step(now=0.0)
        if number % 5 == 0:
            engine.abort(request.request_id)
        if number % 200 == 0:
            engine.check_integrity()
    run_to_end(engine)
    assert engine.prompt_cache is not None
    found = engine.prompt_cache.hits
    assert found > 100
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert engine.kv_cache.pool.num_free == 60
    print(f"\n003-2: 10,000 requests, {found} prompts found, 60 of 60 blocks free")


def test_a_prompt_that_two_requests_computed_side_by_side_is_kept_once() -> None:
    manager = KVCacheManager(num_blocks=20, block_size_tokens=16, enable_prefix_caching=False)
    cache = PromptCache(manager, max_entries=2)

    def computed(first: int) -> Request:
        request = request_of(20, first=first)
        assert manager.allocate(request, manager.get_computed(request), num_new_tokens=20)
        request.num_computed_tokens = 20
        return request

    for request in [computed(first) for first in (0, 500, 0, 900)]:
        cache.put(request, "logits")
        cache.check_integrity()
    assert manager.num_pins == 4
    assert cache.attach(request_of(20, first=500)) is None
    assert cache.attach(request_of(20)) is not None
    manager.check_integrity()


@pytest.mark.parametrize(("num_tokens", "copies"), [(70, 2), (128, 0)])
def test_003_3_a_shared_partial_tail_is_copied_once_for_each_writer(num_tokens: int, copies: int) -> None:
    """In the document two requests share a prompt of 70 tokens in blocks of 64. Whole blocks have no tail."""
    model = PagedModel(block_size_tokens=64)
    config = EngineConfig(num_blocks=20, block_size_tokens=64, eos_token_id=NO_TOKEN, prompt_cache_entries=2)
    engine = Engine(config, model)
    requests = [request_of(num_tokens) for _ in range(3)]
    expected = answer_alone(requests[0])
    run_to_end(engine, requests[0])
    before = model.num_copies
    run_to_end(engine, *requests[1:])
    assert all(answered_tokens(request) == expected for request in requests)
    assert model.num_copies - before == copies


def test_blocks_that_are_merely_kept_do_not_count_as_used() -> None:
    engine = Engine(keeping_config(entries=2, num_blocks=10), PagedModel(block_size_tokens=BLOCK))
    engine.add(request_of(8, max_tokens=2))
    engine.step(now=0.0)
    assert engine.kv_cache.usage == pytest.approx(0.2)
    run_to_end(engine)
    assert engine.kv_cache.usage == 0
    assert engine.kv_cache.pool.usage > 0


@pytest.mark.parametrize(("entries", "resets"), [(0, False), (4, True)])
def test_003_4_no_prompt_is_kept_with_0_entries_or_after_a_reset(entries: int, *, resets: bool) -> None:
    """In the document, 0 meant that nothing was ever evicted."""
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=entries, caching=False), model)
    for _ in range(2):
        run_to_end(engine, request_of(9))
        if resets:
            engine.reset_prefix_cache()
    assert model.num_prefills == 2
    assert engine.kv_cache.pool.num_free == 100


def test_003_4_a_full_cache_evicts_an_entry_and_frees_its_blocks() -> None:
    """The document's release reads an attribute that does not exist, so its first eviction raises."""
    engine = Engine(keeping_config(entries=1, caching=False), PagedModel(block_size_tokens=BLOCK))
    for first in (0, 500):
        run_to_end(engine, request_of(6, first=first))
    assert engine.kv_cache.pool.num_free == 98


MODES = {"naive": 1, "online": 8, "offline": 64}
"""The document's three modes are the number of requests that are computed together (`--max-num-seqs`)."""


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("entries", [0, 3, 256])
def test_003_6_naive_offline_and_online_give_the_same_greedy_answers(*, caching: bool, entries: int) -> None:
    """24 requests share 6 prompts, some of which begin alike. Answers have different lengths."""
    rng = random.Random(8)
    kinds = [(rng.randrange(30, 75), 1000 * (n // 2)) for n in range(6)]
    prefills = {}
    for mode, places in MODES.items():
        config = replace(
            keeping_config(entries=entries, num_blocks=500, caching=caching),
            limits=SchedulerLimits(max_num_seqs=places),
        )
        model = PagedModel(block_size_tokens=BLOCK)
        engine = Engine(config, model)
        requests = [
            request_of(kinds[n % 6][0], first=kinds[n % 6][1], max_tokens=1 + n % 9) for n in range(24)
        ]
        expected = [answer_alone(request) for request in requests]
        for request in requests:
            engine.add(request)
            engine.step(now=0.0)
        run_to_end(engine)
        assert [answered_tokens(request) for request in requests] == expected, mode
        prefills[mode] = model.num_prefills
    if entries != 3:
        assert set(prefills.values()) == {6 if entries else 24}
    print(
        f"\n003-6: 24 requests, 6 prompts, {entries} entries, blocks cached: {caching}: prefills {prefills}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_003_5_fifteen_of_64_prompts_cost_a_quarter_of_the_prefill(mode: str) -> None:
    """This is the document's load, counted in tokens instead of timed: 64 requests with prompts of 856 tokens
    and answers of 16.
    """
    computed = {}
    for entries in (0, 256):
        config = EngineConfig(
            num_blocks=64 * 14,
            block_size_tokens=64,
            enable_prefix_caching=False,
            eos_token_id=NO_TOKEN,
            prompt_cache_entries=entries,
            limits=SchedulerLimits(max_num_seqs=MODES[mode]),
        )
        model = PagedModel(block_size_tokens=64)
        engine = Engine(config, model)
        for n in range(64):
            engine.add(request_of(856, first=1000 * (n % 15), max_tokens=16))
            engine.step(now=0.0)
        run_to_end(engine)
        computed[entries] = model.computed_tokens - 64 * 15  # these are computed in decode steps
    assert computed == {0: 64 * 856, 256: 15 * 856}
    print(f"\n003-5: {mode}: prefill tokens {computed}, {computed[0] / computed[256]:.2f} times fewer")


def test_the_cost_model_charges_a_kept_prompt_like_a_step_of_decoding() -> None:
    costs = CostModel(prefill_tokens_per_s=10.0, decode_step_s=0.5)
    runner = CostRunner(costs, max_loras=1, next_token=lambda _: TokenId(7))
    engine = Engine(keeping_config(entries=1), runner)
    spent = []
    for _ in range(2):
        engine.add(request_of(40, max_tokens=1))
        spent.append(engine.step(now=0.0)[1])
    assert spent[0] > 3.9
    assert spent[1] == pytest.approx(0.5)
