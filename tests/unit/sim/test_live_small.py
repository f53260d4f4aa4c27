"""The parts of the live comparison: prompts of exact sizes, one description of both sides, ranks, and the
report.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from bench.routing.live.report import agreeing, is_late, kendall, report
from bench.routing.live.rules import DEFAULTS
from bench.routing.live.run import Case, Lateness, Result, simulate
from bench.routing.live.small import WORKLOADS
from bench.routing.live.words import prompt_of
from model_server.sim.prompts import Segment
from model_server.text.tokenizer import Tokenizer


def test_a_prompt_has_the_tokens_of_its_segments_and_equal_beginnings_are_equal_text() -> None:
    tokenizer = Tokenizer()
    shared, own = Segment(7, 300), Segment(8, 41)
    whole = prompt_of((shared, own), answers={})
    assert len(tokenizer.encode(whole)) == 341
    assert whole.startswith(prompt_of((shared._replace(num_tokens=120),), answers={}))
    assert tokenizer.encode(whole)[:300] == tokenizer.encode(prompt_of((shared,), answers={}))


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_small_workload_is_the_same_for_the_same_seed_and_fits_its_servers(name: str) -> None:
    first, again = (simulate(Case(name, "round-robin", 1, 3.0, grace_s=60.0)) for _ in range(2))
    assert first == again
    assert first.row.completed == 1
    assert first.row != simulate(Case(name, "round-robin", 2, 3.0)).row


@pytest.mark.parametrize("rule", DEFAULTS)
def test_every_rule_runs_in_the_small_fleet(rule: str) -> None:
    assert simulate(Case("lora", rule, 1, 3.0, grace_s=60.0)).row.completed == 1


def test_pickers_that_share_nothing_hit_less_and_the_report_says_so() -> None:
    results = [
        simulate(Case("chat", rule, 1, 12.0)) for rule in ("least-cost", "least-cost*4", "least-cost/4")
    ]
    one, shared, apart = (result.row.hit_ratio for result in results)
    assert apart < 0.9 * one < shared
    text = report([*results, *(_as_live(result, 1.0) for result in results)])
    assert f"| chat | least-cost/4 | 1 | {apart / one:.3f} | {apart / one:.3f} |" in text


def test_kendall_is_1_for_equal_ranks_and_minus_1_for_opposite_ranks_and_near_ties_are_left_out() -> None:
    assert kendall([1, 2, 3], [10, 20, 30]) == 1
    assert kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert agreeing([1.0, 1.1, 2.0], [1.1, 1.0, 2.0], apart=0.15) == (2, 2)


def test_the_report_shows_only_workloads_that_both_sides_ran() -> None:
    simulated = [
        simulate(Case("b2b", rule, seed, 3.0)) for rule in ("least-cost", "round-robin") for seed in (1, 2)
    ]
    slower = random.Random(1)
    live = [_as_live(result, slower.uniform(1.0, 1.05)) for result in simulated]
    text = report([*simulated, *live, _as_live(simulate(Case("hot", "sgl", 1, 3.0)), 1.0)])
    assert "| b2b | 2 | 2 | 1.00 | 1.00 |" in text
    assert "### hot" not in text, "one side alone is no comparison"


def test_a_run_whose_generator_came_late_is_left_out_and_run_again() -> None:
    simulated = [simulate(Case("b2b", rule, 1, 3.0)) for rule in ("least-cost", "round-robin")]
    punctual = [_as_live(result, 1.0) for result in simulated]
    late = Lateness(sent_p99_s=0.2, loop_p99_s=0.0, ran_share={}, waited_share=0.0, bypassed=0)
    delayed = msgspec.structs.replace(_as_live(simulated[0], 9.0), lateness=late)
    assert is_late(delayed)
    assert not any(map(is_late, [*simulated, *punctual]))
    text = report([*simulated, *punctual, delayed])
    assert "1.00 (1.00 to 1.00)" in text
    assert "1 live runs are left out: their generator was late by more than 50 ms" in text
    assert "left out" not in report([*simulated, *punctual, delayed], late=True)


def _as_live(result: Result, factor: float) -> Result:
    row = replace(
        result.row,
        ttft_mean_s=result.row.ttft_mean_s * factor,
        ttft_p90_s=result.row.ttft_p90_s * factor,
    )
    return msgspec.structs.replace(result, side="live", row=row)
