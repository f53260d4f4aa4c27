"""The routing benchmark in small, replicas that share, and the real picker inside the simulated fleet."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.gpu import gateway
from bench.routing import bounds
from bench.routing.bench import Result, Run, Setting, calibrate, outcome_of, shape_of, simulate, spec_of
from bench.routing.catalog import CONFIGS
from bench.routing.live import vllm
from bench.routing.live.vllm_fleet import Speed
from bench.routing.live.words import prompt_of
from bench.routing.more_workloads import MORE, UNTUNED
from bench.routing.picker_router import PickerRouter
from bench.routing.report import cells_of, goals
from bench.routing.rows import Row, mean_row, row_of
from bench.routing.traces import TraceError
from bench.routing.workloads import SPECS, ClosedLoop, OpenLoop, Turn
from epp.config.policy import DEFAULT_POLICY, RuleName
from model_server.sim.fleet import Change, Fleet, FleetPlan
from model_server.sim.prompts import Segment
from model_server.sim.request import Record
from tests.invariants.picker import check_picker

TINY = Setting(num_servers=3, scale=0.02)
RATES = {"b2b": (2.0, 0.0), "hot": (4.0, 0.0), "lora": (5.0, 0.0), "chat": (3.0, 12.0)}


def run_of(rule: str, workload: str = "b2b", *, load: float = 0.9, setting: Setting = TINY) -> Run:
    rate, unloaded_s = RATES.get(workload, (1.0, 8.0))
    return Run(
        workload=workload,
        rule=rule,
        load=load,
        seed=1,
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


@pytest.mark.parametrize("workload", [*SPECS, *MORE, *UNTUNED, "drawn-2", "drawn-7"])
def test_every_workload_runs_and_repeats_itself(workload: str) -> None:
    first, again = (outcome_of(run_of("least-cost", workload)) for _ in range(2))
    assert repr(first) == repr(again)
    if workload not in {"serial", "clock"}:  # so short, they send few requests, all to one server
        assert len(first.records) > 10
        assert len({record.server for record in first.records}) > 1
    assert first.records


def test_a_failing_server_breaks_off_all_its_answers_and_no_other_does() -> None:
    records = outcome_of(run_of("rr", setting=replace(TINY, failing=1))).records
    assert all(record.failed == (record.server == "pod-0") for record in records)
    assert any(record.failed for record in records)


def test_block_and_step_sizes_are_those_of_the_setting() -> None:
    shape = shape_of(SPECS["conversation"], Setting(block_tokens=16, step_tokens=8192))
    assert (shape.block_tokens, shape.num_blocks, shape.limits.max_num_batched_tokens) == (16, 32_000, 8192)


def test_an_oracle_uses_what_servers_hold_and_a_clairvoyant_is_no_worse() -> None:
    run = run_of("rr", "hot", load=0.5)
    outcomes = outcome_of(run), bounds.outcome_by(bounds.Planned(None), run)
    assert all(record.completed for record in outcomes[1].records)
    assert outcomes[1].hit_tokens > 1.2 * outcomes[0].hit_tokens
    least_s = min(row_of(outcome).ttft_mean_s for outcome in outcomes)
    assert bounds.clairvoyant_s(run, outcomes, moves=20) <= least_s
    assert bounds.clairvoyant_s(run, outcomes[:1], moves=20) < row_of(outcomes[0]).ttft_mean_s


def test_each_number_draws_another_workload() -> None:
    specs = map(spec_of, ("drawn-1", "drawn-1", "drawn-2"))
    first, again, other = (spec.make(random.Random(1), 20) for spec in specs if spec.make is not None)
    assert first == again != other
    with pytest.raises(TraceError):
        spec_of("drawn-x")


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


def test_a_program_lasts_from_its_first_turn_to_its_last_answer() -> None:
    first, later = (
        Turn(added_tokens=9, answer_tokens=9, think_s=2.0, system=s) for s in (Segment(1, 9), None)
    )
    loop = ClosedLoop(iter([[first, later], [first]]), users=1, until_s=99.0, ramp_s=1.0)
    [(sent_s, request)] = loop.start()
    for now in (5.0, 9.0):
        [(sent_s, request)] = loop.after(Record(request=request, arrived_s=sent_s, ended_s=now), now=now)
    assert loop.programs_s == [7.0]
    row = simulate(run_of("rr", "agents", load=1.0, setting=replace(TINY, scale=0.3))).row
    assert 3.0 < row.program_mean_s < row.program_p99_s < 90.0


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


SPEED = Speed(alone_tokens_per_s=400.0, together_tokens_per_s=200.0, step_s=0.1)


@pytest.mark.parametrize("rule", vllm.DEFAULTS)
def test_the_conversations_run_in_the_simulator_by_every_rule(rule: RuleName) -> None:
    first, again = (
        vllm.simulated(rule, setting=vllm.SETTING, seed=1, seconds=30.0, speed=SPEED) for _ in range(2)
    )
    assert first == again
    assert first.requests > 20
    assert first.hit_ratio > 0.2


def test_one_clients_prompts_are_found_again_by_cost_and_never_in_turn() -> None:
    setting = replace(vllm.SETTING, serial=True)
    hits = {
        rule: vllm.simulated(rule, setting=setting, seed=1, seconds=90.0, speed=SPEED).hit_ratio
        for rule in vllm.DEFAULTS
    }
    assert hits["least-cost"] > 0.6
    assert hits["round-robin"] == 0


SCALE = 0.5
SEEDS = (1, 2)
"""In shorter runs caches are still cold, and the spread of load differs by half between seeds."""


def row(capacity: tuple[float, float], *, replicas: int, share_delay_s: float | None = None) -> Row:
    setting = Setting(scale=SCALE, replicas=replicas, share_delay_s=share_delay_s)
    run = replace(run_of("least-cost", setting=setting), capacity_per_s=capacity[0], unloaded_s=capacity[1])
    return mean_row([simulate(replace(run, seed=seed)).row for seed in SEEDS])


@pytest.mark.slow
def test_four_replicas_that_share_hit_and_spread_load_like_one_replica() -> None:
    capacity = calibrate("b2b", Setting(scale=SCALE))
    one = row(capacity, replicas=1)
    four = row(capacity, replicas=4, share_delay_s=0.05)
    alone = row(capacity, replicas=4)
    assert four.hit_ratio >= 0.97 * one.hit_ratio
    assert four.load_cov <= 1.2 * one.load_cov
    assert four.completed >= one.completed - 0.01, "requests that still run at the end are not completed"
    assert alone.hit_ratio < 0.9 * one.hit_ratio, "otherwise this workload would show nothing"


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "changes", [(), (Change(at_s=15.0, restart="pod-1"), Change(at_s=20.0, add="pod-9"))]
)
def test_everything_booked_is_released(replicas: int, changes: tuple[Change, ...]) -> None:
    spec = SPECS["b2b"]
    assert spec.make is not None
    router = PickerRouter(DEFAULT_POLICY, seed=3, replicas=replicas)
    plan = FleetPlan(shape=shape_of(spec), num_servers=3, num_scrapers=replicas, changes=changes)
    workload = OpenLoop(spec.make(random.Random(3), 120), rate_per_s=3.0)
    outcome = Fleet(plan, router=router, workload=workload, rng=random.Random(3)).run()
    assert len(outcome.records) == 120
    for picker in router.pickers:
        check_picker(picker)
        assert all(state.in_flight == 0 for state in picker.fleet.states())


def test_loading_adapters_does_not_make_the_servers_seem_slow() -> None:
    spec = SPECS["lora"]
    assert spec.make is not None
    adapters = frozenset(f"lora-{n}" for n in range(spec.adapters))
    router = PickerRouter(DEFAULT_POLICY, seed=3, adapters=adapters)
    plan = FleetPlan(shape=shape_of(spec), num_servers=3)
    workload = OpenLoop(spec.make(random.Random(3), 400), rate_per_s=2.0)
    outcome = Fleet(plan, router=router, workload=workload, rng=random.Random(3)).run()
    assert outcome.adapter_loads > 100
    rates = [state.tokens_per_s for state in router.pickers[0].fleet.states()]
    assert all(5000 < rate < 8000 for rate in rates), "the rate would be 4,000 if loads counted as prefill"


def test_vllm_servers_that_share_a_gpu_find_their_share_of_it_free() -> None:
    flags = gateway.TALKS.arguments
    assert gateway.TALKS.servers * float(flags[flags.index("--gpu-memory-utilization") + 1]) < 1


def test_each_word_of_a_prompt_is_one_token_of_the_large_model(tmp_path: Path) -> None:
    folder = gateway.large_model(tmp_path / "model", "32b")
    prompt = prompt_of([Segment(1, 500)], answers={})
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
    assert len(tokens) == 500
    assert max(tokens) < json.loads((folder / "config.json").read_text())["vocab_size"]
