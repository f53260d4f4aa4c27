"""The demo's workload, its counters and its table of figures. tests/integration/test_demo.py has the rest."""

import re
from dataclasses import replace

import pytest

from bench.demo.counters import read_counters
from bench.demo.report import RuleFigures, table
from bench.demo.serving import made_up
from bench.demo.workload import Shape, make_workload

DEMO = Shape.of(servers=4, requests=264)


def test_the_prefixes_in_use_fit_four_caches_but_not_two() -> None:
    cache = made_up().cache_tokens
    live = make_workload(DEMO, seed=1).live_prefix_tokens
    assert 2 * cache < live < 4 * cache


def test_one_client_repeats_prompts_that_fit_the_fleet_and_no_server() -> None:
    workload = make_workload(Shape.serial(servers=4, requests=60), seed=1)
    assert 2 * 32_768 < workload.live_prefix_tokens < 4 * 32_768
    sent = [turn.message for (turn,) in workload.users[0].conversations]
    assert (len(set(sent)), len(sent), sent[19:57]) == (19, 60, sent[:19] * 2)
    assert workload.reusable_share() == pytest.approx(41 / 60, abs=0.01)


def test_counters_are_summed_and_a_page_without_one_is_refused() -> None:
    page = "vllm:prefix_cache_queries_total 9\nvllm:prefix_cache_hits_total 4\nvllm:prefix_cache_hits_created 1\n"
    with pytest.raises(ValueError, match="request_success"):
        read_counters(page)
    page += 'vllm:request_success_total{r="stop"} 2\nvllm:request_success_total{r="length"} 3\n'
    counters = read_counters(page)
    assert (counters.queried_tokens, counters.hit_tokens, counters.finished) == (9, 4, 5)


def test_the_table_has_each_figure_and_its_ratio_to_the_first_rule() -> None:
    first = RuleFigures(
        rule="round-robin",
        requests=100,
        failed=0,
        failures=(),
        duration_s=20.0,
        queried_tokens=1000,
        hit_tokens=400,
        ttfts_s=(0.4, 0.1, 0.3, 0.2),
        requests_by_server=(50, 50),
        picker_cpu_s=0.5,
        picker_idle_cpu_s=0.2,
    )
    better = replace(first, hit_tokens=800, ttfts_s=(0.05, 0.1), failed=10, picker_cpu_s=0.8)
    lines = table([first, replace(better, rule="least-cost", requests_by_server=(1060, 40))]).splitlines()
    assert [re.split(" {2,}", line.strip()) for line in (lines[0], *lines[2:])] == [
        ["round-robin", "least-cost", "ratio"],
        ["token hit rate", "40.0 %", "80.0 %", "2.00x"],
        ["prompt tokens computed", "600", "200", "0.33x"],
        ["TTFT p50", "200 ms", "50 ms", "0.25x"],
        ["TTFT p90", "400 ms", "100 ms", "0.25x"],
        ["requests/s", "5.00 /s", "4.50 /s", "0.90x"],
        ["failed requests", "0", "10"],
        ["picker CPU per request", "3.00 ms", "6.00 ms", "2.00x"],
        ["requests by server", "s1", "50", "1,060"],
        ["s2", "50", "40"],
    ]
