"""Scheduler and engine. Time is a number here."""

import functools

import pytest

from model_server.core.engine import Engine, EngineConfig, StepResult, TokenOutput
from model_server.core.request import FinishReason, Request, RequestState, TokenId
from model_server.core.scheduler import SchedulerLimits, StepPlan
from tests.harness.engine_requests import request_of as any_request

request_of = functools.partial(any_request, max_tokens=3, first=None)

EOS = TokenId(2)


class CountingRunner:
    """Each token is its position, and a step takes a second. A prompt that starts with 13 ends after one
    token.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = [
            None
            if not chunk.samples
            else EOS
            if chunk.request.token_ids[0] == 13 and chunk.request.num_output_tokens == 1
            else TokenId(1000 + len(chunk.request.token_ids))
            for chunk in plan.chunks
        ]
        return StepResult(tokens, 1.0)


def counting_engine(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    limits: SchedulerLimits | None = None,
    longest: int | None = None,
) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=block_size,
        max_model_len_tokens=longest,
        eos_token_id=EOS,
        limits=limits or SchedulerLimits(),
    )
    return Engine(config, CountingRunner())


def add(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)


def outputs_to_end(engine: Engine, *, now: float = 0.0) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.num_unfinished:
        new, now = engine.step(now=now)
        engine.check_integrity()
        outputs += new
    assert engine.kv_cache.pool.usage == 0
    return outputs


def scheduled(engine: Engine, *, now: float = 0.0) -> dict[str, int]:
    """Run one step and say how many tokens each request computed in it."""
    plan = engine.begin(now=now)
    engine.check_integrity()
    engine.finish(plan, engine.runner.execute(plan), now=now + 1)
    engine.check_integrity()
    return {chunk.request.request_id: chunk.num_tokens for chunk in plan.chunks}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = counting_engine(limits=SchedulerLimits(max_num_batched_tokens=10))
    request = request_of(25)
    add(engine, request)
    steps = [scheduled(engine)[request.request_id] for _ in range(5)]
    assert steps == [10, 10, 5, 1, 1]
    assert request.finish_reason is FinishReason.LENGTH


def test_decoding_requests_use_the_budget_before_prompts() -> None:
    engine = counting_engine(limits=SchedulerLimits(max_num_batched_tokens=10))
    first, second = request_of(4, max_tokens=9), request_of(30)
    add(engine, first)
    scheduled(engine)
    add(engine, second)
    assert scheduled(engine) == {first.request_id: 1, second.request_id: 9}
    assert scheduled(engine) == {first.request_id: 1, second.request_id: 9}


def test_requests_are_admitted_in_order_of_arrival_up_to_the_limit() -> None:
    engine = counting_engine(limits=SchedulerLimits(max_num_seqs=2))
    requests = [request_of(4, max_tokens=1) for _ in range(3)]
    add(engine, *requests)
    assert list(scheduled(engine)) == [requests[0].request_id, requests[1].request_id]
    assert list(scheduled(engine)) == [requests[2].request_id]


def test_a_small_request_does_not_overtake_a_request_without_room() -> None:
    engine = counting_engine(num_blocks=4)
    running, large, small = request_of(8, max_tokens=4), request_of(12), request_of(2)
    add(engine, running, large, small)
    assert list(scheduled(engine)) == [running.request_id]
    assert [r.request_id for r in engine.scheduler.waiting] == [large.request_id, small.request_id]


def test_without_blocks_the_newest_request_is_preempted_and_counts_once() -> None:
    engine = counting_engine(num_blocks=6)
    requests = [request_of(8, max_tokens=12) for _ in range(2)]
    add(engine, *requests)
    outputs = outputs_to_end(engine)
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions > 0
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        mine = [output.token_id for output in outputs if output.request is request]
        assert mine == [1000 + n for n in range(8, 20)]  # every token is computed once
    assert engine.kv_cache.stats.queries_tokens == 16
    assert requests[1].num_cached_tokens == 0


def test_the_second_request_with_the_same_prefix_computes_only_the_rest() -> None:
    engine = counting_engine()
    first, second = request_of(20, first=50), request_of(22, first=50)
    add(engine, first)
    outputs_to_end(engine)
    add(engine, second)
    assert scheduled(engine) == {second.request_id: 2}
    assert second.num_cached_tokens == 20
    assert engine.kv_cache.stats.hits_tokens == 20
    assert engine.kv_cache.stats.queries_tokens == 42


def test_equal_prompts_admitted_in_one_step_share_their_blocks() -> None:
    engine = counting_engine()
    first, second = request_of(20, first=50), request_of(20, first=50)
    add(engine, first, second)
    assert scheduled(engine) == {first.request_id: 20, second.request_id: 4}


def test_an_adapter_without_a_slot_waits_and_others_pass() -> None:
    engine = counting_engine(limits=SchedulerLimits(max_loras=1))
    a, b, plain, a2 = (request_of(4, adapter=name) for name in ("a", "b", "", "a"))
    add(engine, a, b, plain, a2)
    assert list(scheduled(engine)) == [a.request_id, plain.request_id, a2.request_id]
    assert [r.request_id for r in engine.scheduler.waiting] == [b.request_id]
    outputs_to_end(engine)
    assert b.finish_reason is FinishReason.LENGTH


def test_the_end_token_stops_unless_ignored() -> None:
    engine = counting_engine()
    stops, goes_on = (
        request_of(4, first=13, max_tokens=5),
        request_of(4, first=13, max_tokens=5, ignore_eos=True),
    )
    add(engine, stops, goes_on)
    outputs_to_end(engine)
    assert (stops.finish_reason, stops.num_output_tokens) == (FinishReason.STOP, 2)
    assert (goes_on.finish_reason, goes_on.num_output_tokens) == (FinishReason.LENGTH, 5)


def test_an_answer_ends_at_the_models_length() -> None:
    engine = counting_engine(longest=10)
    request = request_of(8, max_tokens=50)
    add(engine, request)
    outputs_to_end(engine)
    assert request.num_output_tokens == 2
    with pytest.raises(ValueError, match="the prompt has 10 tokens"):
        engine.add(request_of(10))


def test_a_model_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for a longer request"):
        counting_engine(num_blocks=2, block_size=4, longest=9)


def test_abort_frees_blocks_in_every_state() -> None:
    engine = counting_engine(limits=SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=8))
    running, waiting = request_of(20), request_of(20)
    add(engine, running, waiting)
    plan = engine.begin(now=0.0)
    assert engine.kv_cache.pool.usage > 0
    assert engine.abort(running.request_id) is running
    engine.check_integrity()
    assert engine.kv_cache.pool.usage == 0
    assert engine.finish(plan, engine.runner.execute(plan), now=1.0) == []
    engine.abort(waiting.request_id)
    engine.check_integrity()
    assert engine.num_unfinished == 0
    assert running.finish_reason is waiting.finish_reason is FinishReason.ABORT
    assert engine.abort(running.request_id) is None
    assert running.state is RequestState.FINISHED


def test_times_are_counted_from_the_given_now() -> None:
    engine = counting_engine(limits=SchedulerLimits(max_num_batched_tokens=8))
    request = request_of(16, max_tokens=2)
    add(engine, request)
    outputs = outputs_to_end(engine, now=5.0)
    assert request.scheduled_s == 5.0
    assert request.first_token_s == 7.0
    assert request.last_token_s == 8.0
    assert [output.previous_token_s for output in outputs] == [None, 7.0]


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_loras"])
def test_limits_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SchedulerLimits(**{field: 0})
