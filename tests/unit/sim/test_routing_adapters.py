"""Where the default rule loads adapters: few copies, more copies of adapters with more requests, and few
loads.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from bench.routing.adapters import WORKLOAD, Copies, copies_of, table_of
from bench.routing.bench import Run, Setting, simulate

AT_CAPACITY = Run(
    workload=WORKLOAD,
    rule="least-cost",
    load=1.0,
    seed=3,
    setting=Setting(scale=0.6),
    capacity_per_s=23.8,
)


@pytest.fixture(scope="module")
def copies() -> dict[float, list[Copies]]:
    return {load: copies_of(replace(AT_CAPACITY, load=load)) for load in (0.25, 1.3)}


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.25, 1.3])
def test_a_rare_adapter_is_never_on_more_than_two_servers(
    copies: dict[float, list[Copies]], load: float
) -> None:
    rare = copies[load][8:]
    assert max(adapter.share for adapter in rare) < 0.04
    assert max(adapter.most for adapter in rare) <= 2
    assert fmean(adapter.mean for adapter in rare) < 1


def test_the_most_popular_adapter_gets_more_copies_as_its_load_grows_and_never_all_servers(
    copies: dict[float, list[Copies]],
) -> None:
    calm, busy = copies[0.25][0], copies[1.3][0]
    assert calm.mean < 1.5
    assert busy.mean >= 2
    assert busy.most <= 4
    assert busy.mean >= max(adapter.mean for adapter in copies[1.3][1:])


@pytest.mark.slow
def test_adapters_are_loaded_a_third_as_often_as_round_robin_and_ttft_is_no_worse_than_least_load() -> None:
    run = replace(AT_CAPACITY, load=0.9)
    ours, in_turn, least = (simulate(replace(run, rule=rule)).row for rule in ("least-cost", "rr", "least"))
    assert ours.adapter_loads <= in_turn.adapter_loads / 3
    assert ours.ttft_mean_s <= least.ttft_mean_s


@pytest.mark.slow
def test_the_table_has_a_column_for_each_load(copies: dict[float, list[Copies]]) -> None:
    header, _, first, *_ = table_of({load: [runs] for load, runs in copies.items()}).splitlines()
    assert "load 0.25" in header
    assert "load 1.3" in header
    assert first.startswith(f"| 1 | {copies[0.25][0].share:.3f} | {copies[0.25][0].mean:.2f}, ")
