"""The comparison on real vLLM servers, here without them: its conversations, its simulated side, and its
report.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from bench.routing.live import vllm, vllm_report
from bench.routing.live.vllm_fleet import Speed
from bench.routing.live.vllm_report import Believed, VllmRun
from epp.config.policy import RuleName

SPEED = Speed(alone_tokens_per_s=400.0, together_tokens_per_s=200.0, step_s=0.1)


def run_of(rule: RuleName, *, seed: int = 1, slower: float = 1.0) -> VllmRun:
    row = vllm.simulated(rule, setting=vllm.SETTING, seed=seed, seconds=30.0, speed=SPEED)
    return VllmRun(
        rule=rule,
        seed=seed,
        seconds=30.0,
        live=replace(row, ttft_mean_s=slower * row.ttft_mean_s),
        simulated=row,
        requests_per_s=1.0,
        prompt_tokens_per_s=400.0,
        counted_hit_share=0.5,
        speed=SPEED,
        true_prefill_tokens_per_s=[200.0, None],
        true_cache_tokens=5120,
        true_bytes_per_token=5.0,
        believed=[Believed(prefill_tokens_per_s=210.0, table_tokens=5000.0, bytes_per_token=4.9)],
        sent_late_p99_s=0.01,
        failures=[],
    )


@pytest.mark.parametrize("rule", vllm.DEFAULTS)
def test_the_conversations_run_in_the_simulator_by_every_rule(rule: RuleName) -> None:
    first, again = (
        vllm.simulated(rule, setting=vllm.SETTING, seed=1, seconds=30.0, speed=SPEED) for _ in range(2)
    )
    assert first == again
    assert first.requests > 20
    assert first.hit_ratio > 0.2


def test_report_names_the_pairs_of_rules_that_simulator_orders_differently() -> None:
    runs = [run_of("least-cost", slower=9.0), run_of("round-robin"), run_of("round-robin", seed=2)]
    text = vllm_report.report(runs)
    assert "over 15% apart by mean TTFT: 1; in another order live: 1" in text
    assert "- least-cost and round-robin: simulated" in text
    assert text.index("| round-robin | 1 |") < text.index("| least-cost | 1 |"), (
        "only seeds that both sides have run count"
    )
    assert "| cache, tokens | 5,120 (5,120 to 5,120) | 5,000 (5,000 to 5,000) |" in text
    slow = msgspec.structs.replace(runs[1], true_prefill_tokens_per_s=[50.0, 150.0])
    assert vllm_report.ttft_in_prompt_tokens(slow) == 100 * slow.live.ttft_mean_s, (
        "a machine at half the speed"
    )
    assert "in another order live: 0" in vllm_report.report([run_of("least-cost"), run_of("round-robin")])
    assert vllm_report.report([]) == "no results yet"
