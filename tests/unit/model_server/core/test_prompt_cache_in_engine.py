"""The continuous engine keeps whole prompts. A kept prompt needs no prefill, and requests get blocks
before kept prompts do.
"""

from __future__ import annotations

import functools
import random

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
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
def test_a_kept_prompt_is_answered_without_computing_its_tokens(
    num_tokens: int, *, partial: bool, caching: bool
) -> None:
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=2, partial=partial, caching=caching), model)
    first, second = request_of(num_tokens), request_of(num_tokens)
    expected = answer_alone(first)
    engine.add(first)
    run_to_end(engine)
    before = model.num_prefills, model.computed_tokens
    engine.add(second)
    run_to_end(engine)
    assert answered_tokens(first) == answered_tokens(second) == expected
    assert model.num_prefills == before[0]
    assert model.computed_tokens - before[1] == second.max_tokens - 1, "the first token needs no computation"
    assert second.num_cached_tokens == num_tokens


def test_a_prompt_of_another_adapter_is_another_prompt() -> None:
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=2), model)
    for adapter in ("", "alpha"):
        one = request_of(9, adapter=adapter)
        expected = answer_alone(one)
        engine.add(one)
        run_to_end(engine)
        assert answered_tokens(one) == expected
        assert one.num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_answers_equal_those_of_a_request_alone_even_if_blocks_are_short(seed: int) -> None:
    """Prompts are repeated, batches are mixed, requests are preempted, and some are aborted. Kept prompts are
    evicted for all of them.
    """
    rng = random.Random(seed)
    config = keeping_config(entries=3, num_blocks=14, partial=seed % 2 == 0, caching=seed % 3 > 0, budget=16)
    engine = Engine(config, PagedModel(block_size_tokens=BLOCK))
    done: list[tuple[Request, list[TokenId]]] = []
    kept = 0
    for _ in range(60):
        one = request_of(rng.randrange(1, 30), first=100 * rng.randrange(3), max_tokens=rng.randrange(1, 9))
        if rng.random() < 0.6:
            one = request_of(rng.choice((9, 16)), max_tokens=rng.randrange(1, 9))
        done.append((one, answer_alone(one)))
        engine.add(one)
        for _ in range(rng.randrange(6)):
            engine.step(now=0.0)
            engine.check_integrity()
        if rng.random() < 0.1:
            engine.abort(one.request_id)
            engine.check_integrity()
    run_to_end(engine)
    for one, expected in done:
        assert answered_tokens(one) == expected[: one.num_output_tokens]
        kept += one.num_cached_tokens == one.num_prompt_tokens
    assert kept > 5
    assert any(one.num_preemptions for one, _ in done)
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert engine.kv_cache.pool.num_free == config.num_blocks


def test_blocks_that_are_merely_kept_do_not_count_as_used() -> None:
    engine = Engine(keeping_config(entries=2, num_blocks=10), PagedModel(block_size_tokens=BLOCK))
    engine.add(request_of(8, max_tokens=2))
    engine.step(now=0.0)
    assert engine.kv_cache.usage == pytest.approx(0.2)
    run_to_end(engine)
    assert engine.kv_cache.usage == 0
    assert engine.kv_cache.pool.usage > 0


def test_a_request_that_needs_every_block_gets_them() -> None:
    engine = Engine(keeping_config(entries=9, num_blocks=6), PagedModel(block_size_tokens=BLOCK))
    for first in (0, 100, 200):
        engine.add(request_of(6, first=first, max_tokens=1))
        run_to_end(engine)
    whole = request_of(20, first=900, max_tokens=4)
    expected = answer_alone(whole)
    engine.add(whole)
    run_to_end(engine)
    assert answered_tokens(whole) == expected


def test_no_prompt_is_kept_if_the_cache_is_off_or_after_a_reset() -> None:
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=0, caching=False), model)
    for _ in range(2):
        engine.add(request_of(9))
        run_to_end(engine)
    assert model.num_prefills == 2
    model = PagedModel(block_size_tokens=BLOCK)
    engine = Engine(keeping_config(entries=4, caching=False), model)
    for _ in range(2):
        engine.add(request_of(9))
        run_to_end(engine)
        engine.reset_prefix_cache()
    assert model.num_prefills == 2


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
