"""Whatever comes in any order, every request ends with its own tokens, and nothing stays behind."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import FinishReason, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, CostRunner
from model_server.text.answers import Answers
from model_server.text.tokenizer import Tokenizer
from tests.harness.engine_requests import request_of

TOKENIZER = Tokenizer()
ANSWERS = Answers(TOKENIZER, mean_tokens=6)

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # the number of its prefix
        st.integers(1, 20),  # prompt tokens
        st.integers(1, 8),  # the largest number of answer tokens
        st.sampled_from([None, "a", "b"]),
        st.integers(0, 4),  # steps before the next arrival
        st.sampled_from([None, None, 0, 2, 5]),  # steps before it is aborted
    ),
    min_size=1,
    max_size=12,
)


def cost_engine(num_blocks: int, seqs: int, budget: int) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=4,
        eos_token_id=ANSWERS.eos_token_id,
        limits=SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=budget, max_loras=1),
    )
    return Engine(config, CostRunner(CostModel(), max_loras=1, next_token=ANSWERS.next_token))


def answer_of_twin(request: Request) -> list[TokenId]:
    """Return the answer that a request gets when the server serves nothing else."""
    twin = Request(
        request_id=request.request_id,
        token_ids=request.token_ids[: request.num_prompt_tokens],
        max_tokens=request.max_tokens,
        arrival_s=0.0,
        adapter=request.adapter,
    )
    engine = cost_engine(100, 1, 1000)
    engine.add(twin)
    while engine.num_unfinished:
        engine.step(now=0.0)
    return twin.token_ids


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(arrivals=arrivals, num_blocks=st.integers(8, 20), seqs=st.integers(1, 4), budget=st.integers(1, 16))
def test_every_request_gets_the_tokens_that_it_would_get_alone(
    arrivals: list[tuple[int, int, int, str | None, int, int | None]], num_blocks: int, seqs: int, budget: int
) -> None:
    engine = cost_engine(num_blocks, seqs, budget)
    now, steps = 0.0, 0
    due: dict[RequestId, int] = {}
    requests: list[Request] = []

    def step() -> None:
        nonlocal now, steps
        if engine.num_unfinished:
            _, now = engine.step(now=now)
        steps += 1
        for name in [name for name, at in due.items() if at <= steps]:
            del due[name]
            engine.abort(name)
        engine.check_integrity()
        assert steps < 5000, "the requests do not end"

    for index, (prefix, length, most, adapter, gap, abort_after) in enumerate(arrivals):
        requests.append(
            request_of(length, name=str(index), first=1000 * prefix, max_tokens=most, adapter=adapter)
        )
        engine.add(requests[-1])
        if abort_after is not None:
            due[requests[-1].request_id] = steps + abort_after
        for _ in range(gap):
            step()
    while engine.num_unfinished:
        step()

    assert engine.kv_cache.pool.num_free == num_blocks
    for request in requests:
        expected = answer_of_twin(request)
        if request.finish_reason is FinishReason.ABORT:
            assert request.token_ids == expected[: len(request.token_ids)]
        else:
            assert request.token_ids == expected
