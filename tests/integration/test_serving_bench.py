"""The bench of serving loads: its client against our server with made-up words, and the figures that it
computes from times.
"""

from __future__ import annotations

import argparse
import os
import time

import pytest

from bench.model_server.serving import client, figures, turns
from bench.model_server.serving.client import Load, RequestTimes, Run
from bench.model_server.serving.clocks import CpuClock, WallClock
from model_server.runners.cost import CostModel
from tests.harness.http_model_server import FAST, Start

pytest_plugins = ["tests.harness.http_model_server_fixtures"]


@pytest.mark.parametrize(("cache", "hits"), [(True, 0.375), (False, 0.0)])
async def test_001_7s_load_hits_37_5_percent_and_every_token_is_timed(
    start: Start, *, cache: bool, hits: float
) -> None:
    """The prompts have the document's lengths in whole blocks. The shared part was sent before."""
    load = Load(requests=40, shared_tokens=336, own_tokens=560, answer_tokens=5, rate_per_s=2000.0)
    costs = CostModel(speed=50)
    server = await start(enable_prefix_caching=cache, costs=costs, num_blocks=4096)
    async with server.http.get("/health") as response:
        url = str(response.url.origin())
    run = await client.serve(url, "demo", load, name="x", clock=WallClock())
    assert [len(one.token_s) for one in run.served] == [5] * 40
    assert run.hit_share == pytest.approx(hits, abs=1e-6)
    assert run.prompt_tokens == 40 * 896


async def test_by_the_cpus_clock_idle_time_is_skipped_and_tokens_come_in_order(start: Start) -> None:
    """There are five requests, an hour apart. With a wall clock the test would take hours."""
    load = Load(requests=5, shared_tokens=0, own_tokens=32, answer_tokens=3, rate_per_s=1 / 3600)
    server = await start(costs=FAST)
    async with server.http.get("/health") as response:
        url = str(response.url.origin())
    run = await client.serve(url, "demo", load, name="x", clock=CpuClock([os.getpid()]))
    assert run.elapsed_s >= load.arrivals_s()[-1]
    assert [len(one.token_s) for one in run.served] == [3] * 5
    assert all(0 < one.ttft_s < 3600 and min(one.gaps_s) >= 0 for one in run.served)


def test_the_cpus_clock_of_a_process_is_the_one_that_it_sees_itself() -> None:
    clock = CpuClock([os.getpid()])
    before, told, after = time.process_time(), clock.now_s(), time.process_time()
    assert before <= told <= after


def test_times_become_means_and_percentiles() -> None:
    run = Run([RequestTimes([0.1, 0.2, 0.4]), RequestTimes([0.3, 0.4, 0.5])], 2.0, 200, 0.5)
    row = run.row()
    assert row["TTFT ms"] == pytest.approx(200)
    assert row["TTFT P99"] == pytest.approx(300)
    assert row["TPOT ms"] == pytest.approx(125)
    assert row["ITL P99"] == pytest.approx(200)
    assert (row["requests/s"], row["input tokens/s"], row["output tokens/s"]) == (1, 100, 3)


def test_in_turns_each_repeat_swaps_the_sides_and_neighbouring_runs_share_a_start() -> None:
    args = argparse.Namespace(
        repeats=3, seed=1, rates=[0.1, 0.3], caches=["on", "off"], clock="cpu", layers=0
    )
    args.requests, args.shared_tokens, args.own_tokens, args.answer_tokens = 16, 320, 533, 150
    starts = [
        [(run["cache"], run["seed"], run["rate"]) for run in wanted]
        for wanted in turns.in_turns(args, "ours")
    ]
    assert starts == [
        [(True, 1, 0.1), (True, 1, 0.3)],
        [(False, 1, 0.1), (False, 1, 0.3), (False, 2, 0.1), (False, 2, 0.3)],
        [(True, 2, 0.1), (True, 2, 0.3), (True, 3, 0.1), (True, 3, 0.3)],
        [(False, 3, 0.1), (False, 3, 0.3)],
    ]


def test_at_once_each_repeat_has_its_start_and_both_sides_of_a_rate_follow_each_other() -> None:
    args = argparse.Namespace(
        repeats=2, seed=1, rates=[0.1, 0.3], caches=["on", "off"], clock="cpu", layers=0
    )
    args.requests, args.shared_tokens, args.own_tokens, args.answer_tokens = 16, 320, 533, 150
    starts = list(turns.at_once(args, "ours"))
    assert [[(run["cache"], run["seed"], run["rate"]) for run in wanted] for wanted in starts] == [
        [(True, 1, 0.1), (False, 1, 0.1), (True, 1, 0.3), (False, 1, 0.3)],
        [(False, 2, 0.1), (True, 2, 0.1), (False, 2, 0.3), (True, 2, 0.3)],
    ]
    wanted = starts[0]
    # This is a row of an earlier version. Rows without `sides` were made in turns.
    before = {name: value for name, value in wanted[0].items() if name != "sides"}
    assert not turns.made(before, wanted[0])
    assert turns.made(before, next(turns.in_turns(args, "ours"))[0])
    assert turns.made(wanted[0] | {"row": {"TTFT ms": 1.0}}, wanted[0])
    rows = [run | {"row": {"hits": 0.5, "TTFT ms": 1.0}} for run in (*wanted, before)]
    columns, lines = figures.table(rows)
    sides, cache = columns.index("sides"), columns.index("cache")
    assert {line[sides] for line in lines if line[cache] == "on / off"} == {"at once"}
    assert {line[sides] for line in lines} == {"at once", "in turns"}


def test_repeats_become_means_medians_and_extremes_and_the_ratios_of_each_repeats_own_runs() -> None:
    about = {"engine": "ours", "layers": 30, "requests": 6, "shared": 1, "own": 1, "answered": 1}
    runs = [
        {
            **about,
            "rate": 0.1,
            "clock": "cpu",
            "cache": cache,
            "seed": seed,
            "row": {"hits": 0.5, "TTFT ms": ms},
        }
        for cache, times in ((True, (10.0, 30.0, 20.0)), (False, (40.0, 40.0, 80.0)))
        for seed, ms in enumerate(times)
    ]
    columns, lines = figures.table(runs)
    cache, kind, ttft = columns.index("cache"), columns.index(""), columns.index("TTFT ms")
    told = {(line[cache], line[kind]): line[ttft] for line in lines}
    assert [told["on", kind] for kind in ("mean", "median", "least", "most")] == [20, 20, 10, 30]
    ratios = [told["on / off", kind] for kind in ("mean", "median", "least", "most")]
    assert ratios == pytest.approx([1.25 / 3, 0.25, 0.25, 0.75])
    _, alone = figures.table(runs[:1])
    assert [(line[cache], line[kind]) for line in alone] == [("on", "mean")]


def test_sides_get_the_same_arrivals_and_repeats_get_others() -> None:
    one, same, other = (
        Load(requests=50, shared_tokens=330, own_tokens=550, answer_tokens=1, rate_per_s=3.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one.arrivals_s() == same.arrivals_s() != other.arrivals_s()
    assert one.prompts(name="a") == same.prompts(name="a")
    shared = [prompt[:330] for prompt in one.prompts(name="a")]
    assert all(start == shared[0] for start in shared)
    assert shared[0] != other.prompts(name="a")[0][:330]
    assert sum(one.arrivals_s()[-1:]) == pytest.approx(50 / 3, rel=0.5)
