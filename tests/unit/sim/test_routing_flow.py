"""Flow control in the simulator: requests wait at the gate, and the workloads for flow control have the
promised properties.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from bench.routing.bench import Run, Setting, plan_of, simulate, spec_of
from bench.routing.fair_shares import max_min
from bench.routing.flow import SETTINGS, Place, Row, outcome_of, row_of
from bench.routing.more_workloads import (
    INTERACTIVE,
    MORE,
    burst,
    greedy_tenant,
    two_priorities,
)
from bench.routing.untuned_workloads import UNTUNED
from bench.routing.workloads import Timed, no_sharing
from model_server.sim.fleet import Outcome
from model_server.sim.request import SimRequest

CAPACITY = (3.0, 0.0)
"""About as much of workload `none` as two servers can do."""


def place(load: float, *, mix: str = "", scale: float = 0.1) -> Place:
    setting = Setting(num_servers=2, scale=scale)
    return Place(workload="none", load=load, seed=1, setting=setting, capacity=CAPACITY, mix=mix)


def run(flow: str, load: float, *, mix: str = "") -> tuple[Outcome, Row]:
    outcome = outcome_of(place(load, mix=mix), SETTINGS[flow])
    return outcome, row_of(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("flow", list(SETTINGS))
def test_every_request_is_served_or_refused_and_a_run_repeats_itself(flow: str) -> None:
    first, _ = run(flow, 2.0)
    again, _ = run(flow, 2.0)
    assert repr(first) == repr(again)
    assert len(first.records) == 200
    for record in first.records:
        assert record.completed == bool(record.server), "neither served nor refused"
    refused = sum(not record.server for record in first.records)
    assert (refused > 0) == (flow == "refuse")


@pytest.mark.slow
def test_with_a_deadline_more_requests_are_served_in_time_under_overload() -> None:
    off, on = run("off", 2.0)[1], run("refuse", 2.0)[1]
    assert on.good > off.good + 0.2
    assert on.ttft_p90_s < off.ttft_p90_s


@pytest.mark.slow
def test_under_overload_requests_with_a_higher_priority_wait_less() -> None:
    _, row = run("queue", 2.0, mix="interactive")
    assert set(row.by_class) == {f"priority {INTERACTIVE}"}
    assert row.by_class[f"priority {INTERACTIVE}"][1] < row.ttft_p90_s / 2


@pytest.mark.slow
def test_light_tenants_wait_less_than_half_as_long_as_the_greedy_tenant() -> None:
    by_class = run("queue", 2.0, mix="greedy")[1].by_class
    light = max(p90_s for name, (_, p90_s) in by_class.items() if name != "greedy")
    assert light < by_class["greedy"][1] / 2


@pytest.mark.slow
def test_light_tenants_get_90_percent_of_their_max_min_share_beside_a_greedy_tenant() -> None:
    off, on = (run(flow, 2.4, mix="greedy")[1].of_max_min for flow in ("off", "queue"))
    assert min(on.values()) > 0.9
    assert min(off.values()) < min(on.values())


def test_max_min_gives_the_unused_share_of_a_small_tenant_to_the_others() -> None:
    assert max_min({"a": 1.0, "b": 5.0, "c": 9.0}, 10.0) == {"a": 1.0, "b": 4.5, "c": 4.5}
    assert max_min({"a": 1.0, "b": 2.0}, 10.0) == {"a": 1.0, "b": 2.0}


@pytest.mark.slow
def test_flow_control_changes_nothing_if_a_server_is_always_free() -> None:
    off, on = (outcome_of(place(0.05), SETTINGS[name]) for name in ("off", "queue"))
    assert [r.arrived_s for r in on.records] == [r.arrived_s for r in off.records]
    assert all(record.completed for record in on.records)


# -- workloads -----------------------------------------------------------------------------------------------


def requests(timed: Sequence[Timed]) -> list[SimRequest]:
    return [t.request for t in timed]


@pytest.mark.slow
@pytest.mark.parametrize("workload", [*MORE, *UNTUNED])
def test_every_workload_runs(workload: str) -> None:
    made = Run(
        workload=workload,
        rule="least-cost",
        load=0.5,
        seed=1,
        setting=Setting(num_servers=3, scale=0.02),
        capacity_per_s=1.0,
        unloaded_s=8.0,
    )
    assert simulate(made).row.completed > 0


def test_a_burst_is_ten_times_the_load_for_half_a_minute() -> None:
    calm = no_sharing(random.Random(1), 2000)
    made = burst(calm, rate_per_s=2.0)
    pressed = [n for n, (a, b) in enumerate(zip(calm, made, strict=True)) if a.gap != b.gap]
    assert len(pressed) == 600
    assert sum(made[n].gap for n in pressed) / 2.0 == pytest.approx(30, rel=0.15)


def test_mixtures_have_their_documented_shares() -> None:
    calm = no_sharing(random.Random(1), 3000)
    people = sum(r.priority == INTERACTIVE for r in requests(two_priorities(calm, random.Random(1))))
    assert people / 3000 == pytest.approx(0.2, abs=0.03)
    tenants = Counter(r.tenant for r in requests(greedy_tenant(calm, random.Random(1))))
    assert tenants["greedy"] / tenants["light-0"] == pytest.approx(10, rel=0.2)


def test_slow_servers_have_half_the_speed_and_half_the_cache() -> None:
    plan = plan_of(Setting(unlike=2), spec_of("none"), arrivals_s=10.0)
    assert plan.speeds == (0.5, 0.5)
    assert plan.cache_shares == {"pod-0": 0.5, "pod-1": 0.5}
