"""The routing benchmark in small: every rule runs, the same seed gives the same figures, and a shared
cache helps.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.routing.bench import (
    Result,
    Run,
    Setting,
    costs_of,
    outcome_of,
    simulate,
    spec_of,
)
from bench.routing.catalog import CONFIGS
from bench.routing.report import cells_of, goals
from bench.routing.traces import TraceError
from bench.routing.workloads import SPECS

TINY = Setting(num_servers=3, scale=0.02)
RATES = {"b2b": (2.0, 0.0), "hot": (4.0, 0.0), "lora": (5.0, 0.0), "chat": (3.0, 12.0)}


def run_of(
    rule: str, workload: str = "b2b", *, load: float = 0.9, setting: Setting = TINY, seed: int = 1
) -> Run:
    rate, unloaded_s = RATES.get(workload, (1.0, 8.0))
    return Run(
        workload=workload,
        rule=rule,
        load=load,
        seed=seed,
        setting=setting,
        capacity_per_s=rate,
        unloaded_s=unloaded_s,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", [config.name for config in CONFIGS])
def test_every_configuration_serves_every_request_and_repeats_itself(rule: str) -> None:
    first, again = (outcome_of(run_of(rule, load=0.5)) for _ in range(2))
    assert repr(first) == repr(again)
    assert all(record.server in {"pod-0", "pod-1", "pod-2"} for record in first.records)
    assert all(record.completed for record in first.records)


@pytest.mark.parametrize("workload", [*SPECS, "drawn-2", "drawn-7"])
def test_every_workload_runs_and_repeats_itself(workload: str) -> None:
    first, again = (outcome_of(run_of("least-cost", workload)) for _ in range(2))
    assert repr(first) == repr(again)
    assert len(first.records) > 10
    assert len({record.server for record in first.records}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["b2b", "chat", "lora"])
def test_routing_by_prefix_finds_more_in_the_caches_than_taking_turns(workload: str) -> None:
    setting = replace(TINY, scale=0.1)
    least_cost, in_turn = (
        simulate(run_of(rule, workload, setting=setting)).row for rule in ("least-cost", "rr")
    )
    assert least_cost.hit_ratio > in_turn.hit_ratio


def test_each_number_draws_another_workload() -> None:
    specs = map(spec_of, ("drawn-1", "drawn-1", "drawn-2"))
    first, again, other = (spec.make(Random(1), 20) for spec in specs if spec.make is not None)
    assert first == again != other
    with pytest.raises(TraceError):
        spec_of("drawn-x")


def test_a_constant_of_the_servers_changes_what_requests_take() -> None:
    slow = replace(TINY, costs="decode_step_s=0.016")
    usual, slower = (simulate(run_of("rr", setting=setting)).row for setting in (TINY, slow))
    assert slower.tpot_p90_s > 1.5 * usual.tpot_p90_s
    with pytest.raises(TypeError):
        costs_of("decode_steps=1")


def test_a_mooncake_trace_is_read_with_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 700, "output_length": 5, "hash_ids": [0, n + 1]}
        for n in range(40)
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    outcome = outcome_of(replace(run_of("least"), workload=str(path)))
    assert len(outcome.records) == 40
    assert {record.num_cached_tokens for record in outcome.records} == {0, 512}


def test_an_azure_trace_is_read_with_made_up_prefixes(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:15:{n % 60:02d}.{n:07d},{2000 + n},{20 + n % 7}" for n in range(40)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *sorted(lines)]))
    outcome = outcome_of(replace(run_of("least-cost"), workload=str(path)))
    assert len(outcome.records) == 40
    assert all(2000 <= record.num_prompt_tokens < 2040 for record in outcome.records)
    assert any(record.num_cached_tokens for record in outcome.records)


def test_a_ratio_has_its_error_over_the_seeds() -> None:
    def result(rule: str, seed: int, *, ttft_s: float, good: float) -> Result:
        row = replace(simulated, ttft_mean_s=ttft_s, ttft_p90_s=1.0, tpot_p90_s=1.0, good=good)
        return Result(run=replace(run_of(rule), seed=seed), row=row)

    simulated = simulate(run_of("rr")).row
    results = [
        result("least-cost", 2, ttft_s=2.2, good=0.5),
        result("least-cost", 1, ttft_s=1.0, good=0.5),
        result("rr", 1, ttft_s=1.0, good=0.53),
        result("rr", 2, ttft_s=2.0, good=0.53),
        result("lpwl", 1, ttft_s=0.1, good=1.0),
    ]
    _, _, line, over_all, _, reached = goals(cells_of(results)).splitlines()
    assert "| rr 1.50 | 1.07 ± 0.05 | rr 1.00 | 1.00 ± 0.00 |" in line
    assert over_all.startswith("| all | | | | | 1.07 ± 0.05 |")
    assert reached.endswith("Goodput is under the best other's by 0.03 or more at 1.")
