"""The cost model: what makes a step longer, and by how much."""

import itertools

import pytest

from model_server.core.request import Adapter, Request, RequestId, TokenId
from model_server.core.scheduler import Chunk, StepPlan
from model_server.runners.cost import CostModel, CostRunner

_ids = itertools.count()
MODEL = CostModel(
    prefill_tokens_per_s=1000,
    context_knee_tokens=10_000,
    decode_step_s=0.02,
    decode_per_request_s=0.001,
    decode_per_context_token_s=1e-6,
    interference=0.5,
    lora_load_s=0.25,
)


def chunk(num_tokens: int, *, start: int = 0, adapter: str = "", samples: bool = True) -> Chunk:
    request = Request(
        request_id=RequestId(str(next(_ids))),
        token_ids=[TokenId(0)] * (start + num_tokens),
        max_tokens=5,
        arrival_s=0.0,
        adapter=Adapter(adapter) if adapter else None,
    )
    return Chunk(request, start=start, num_tokens=num_tokens, samples=samples, table=())


def test_prefill_time_is_tokens_over_rate_and_rises_with_context() -> None:
    assert MODEL.step_s([(0, 1000)]) == pytest.approx(1.05)
    assert MODEL.step_s([(10_000, 1000)]) == pytest.approx(2.05)


def test_the_chunks_of_a_prompt_cost_as_much_as_the_whole_prompt() -> None:
    whole = MODEL.prefill_s(start=0, num_tokens=4000)
    parts = sum(MODEL.prefill_s(start=start, num_tokens=1000) for start in range(0, 4000, 1000))
    assert parts == pytest.approx(whole)


def test_a_small_prefill_costs_a_whole_step() -> None:
    assert MODEL.step_s([(0, 2)]) == MODEL.decode_step_s


def test_decode_rises_with_batch_and_context() -> None:
    assert MODEL.step_s([(100, 1)]) == pytest.approx(0.0201)
    assert MODEL.step_s([(100, 1)] * 11) == pytest.approx(0.02 + 0.010 + 0.0011)


def test_prefill_beside_decode_costs_more_than_both() -> None:
    assert MODEL.step_s([(100, 1), (0, 1000)]) == pytest.approx(0.0201 + 1.05 * 1.5)


def test_speed_divides_durations_and_resident_adapters_load_once() -> None:
    fast = CostModel(decode_step_s=0.02, lora_load_s=0.25, speed=10, decode_per_context_token_s=0)
    runner = CostRunner(fast, max_loras=2, next_token=lambda _: TokenId(7))

    def took(adapter: str) -> float:
        return runner.execute(StepPlan((chunk(1, start=1, adapter=adapter),))).duration_s

    assert took("") == pytest.approx(0.002)
    assert [took(name) for name in "aabacb"] == pytest.approx([0.027, 0.002, 0.027, 0.002, 0.027, 0.027])


def test_only_chunks_that_sample_yield_a_token() -> None:
    runner = CostRunner(MODEL, max_loras=2, next_token=lambda _: TokenId(7))
    plan = StepPlan((chunk(5, samples=False), chunk(1, start=9)))
    assert list(runner.execute(plan).token_ids) == [None, TokenId(7)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speed", 0),
        ("speed", float("nan")),
        ("prefill_tokens_per_s", -1),
        ("decode_step_s", float("inf")),
        ("interference", -0.1),
    ],
)
def test_invalid_costs_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must"):
        CostModel(**{field: value})
