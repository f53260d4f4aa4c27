"""An autoscaler that uses the picker's own signal: Kubernetes's rule worked out by hand, and a short day
in the simulated fleet.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.autoscaling.autoscaler import Autoscaler, Behaviour, Pace
from bench.autoscaling.demand import Day, Demand, Rate, rate_at
from bench.autoscaling.simulate import Plan, simulate
from bench.routing.workloads import no_sharing
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Change, Fleet, FleetPlan
from tests.unit.sim.test_sim_fleet import InTurn, Steady

AT_ONCE = Behaviour(
    up=(Pace(kind="Pods", value=100, period_s=15),),
    down_window_s=0.0,
    down=(Pace(kind="Pods", value=100, period_s=15),),
)


@pytest.mark.parametrize(
    ("value", "servers"), [(0.7, 4), (0.76, 4), (0.64, 4), (0.78, 5), (1.4, 8), (0.5, 3), (0.0, 1), (None, 4)]
)
def test_the_count_follows_the_value_over_its_target(value: float | None, servers: int) -> None:
    scaler = Autoscaler(target=0.7, least=1, most=10, behaviour=AT_ONCE)
    assert scaler.servers(None, requested=4, ready=4, now=0.0) == 4
    assert scaler.servers(0.7, requested=4, ready=4, now=0.0) == 4
    assert scaler.servers(value, requested=4, ready=4, now=15.0) == servers


def test_only_ready_servers_count_as_those_that_carry_the_load() -> None:
    scaler = Autoscaler(target=0.5, least=1, most=10, behaviour=AT_ONCE)
    assert scaler.servers(1.0, requested=4, ready=2, now=0.0) == 4


def test_the_charts_autoscaler_adds_half_a_minute_and_removes_one_at_a_time_after_ten_minutes() -> None:
    scaler = Autoscaler(target=0.7, least=2, most=20)
    there, seen = 4, []
    for step in range(200):
        now = 15.0 * step
        wanted = scaler.servers(3.0 if now < 120 else 0.1, requested=there, ready=there, now=now)
        if wanted != there:
            there = wanted
            seen.append((now, there))
    assert seen == [(15.0, 6), (75.0, 9), *((720.0 + 300 * n, 8 - n) for n in range(7))]


def test_arrivals_follow_a_rate_that_rises_and_falls() -> None:
    rates = Day(calm_per_s=2, peak_per_s=8, calm_s=100, rise_s=100, peak_s=100, fall_s=100, end_s=100).rates()
    assert rate_at(rates, 150) == 5
    times = [at for at, _ in Demand(no_sharing(random.Random(1), 3000), rates).start()]
    assert times == sorted(times)
    counts = [sum(low <= at < low + 100 for at in times) for low in range(0, 500, 100)]
    assert counts == pytest.approx([200, 500, 800, 500, 200], rel=0.2)
    assert rates[0] == Rate(0.0, 2)


def test_a_server_that_is_removed_finishes_its_requests_and_gets_no_new_ones() -> None:
    plan = FleetPlan(
        shape=EngineShape(num_blocks=200, block_tokens=16),
        num_servers=2,
        changes=(Change(at_s=0.3, remove="pod-1"),),
    )
    router = InTurn()
    outcome = Fleet(plan, router=router, workload=Steady(count=60, gap_s=0.01), rng=random.Random(1)).run()
    assert all(record.completed for record in outcome.records)
    late = {record.server for record in outcome.records if record.arrived_s > 0.3}
    assert late == {"pod-0"}
    ended = [r.ended_s for r in outcome.records if r.server == "pod-1" and r.ended_s is not None]
    assert max(ended) > 0.3


DAY = Day(calm_per_s=1.6, peak_per_s=5.4, calm_s=300, rise_s=900, peak_s=300, fall_s=300, end_s=1500)
"""The load of servers that do 1.4 prompts a second each. The prompts share nothing."""
SHARING = replace(DAY, calm_per_s=0.9, peak_per_s=3.2)
"""The load of servers that do 0.8 requests a second each. Long prompts begin alike, and answers are long."""


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "day"), [("none", DAY), ("b2b", SHARING)], ids=["none", "b2b"])
def test_servers_are_added_before_first_tokens_are_late_and_removed_without_oscillation(
    workload: str, day: Day
) -> None:
    plan = Plan(workload=workload, day=day)
    scaled = simulate(plan)
    left_alone = simulate(replace(plan, most=plan.least, day=replace(day, fall_s=0, end_s=0)))
    assert left_alone.broke_at_s is not None, "the load is more than two servers can do"
    assert scaled.added_at_s is not None
    assert scaled.added_at_s + plan.start_s < left_alone.broke_at_s + 300
    assert scaled.broke_at_s is None, scaled.stretches
    assert scaled.moments[-1].servers < scaled.most, "servers are taken away again"
    assert scaled.turns <= 1, "in a calm hour chance may ask for one more server"
    assert len(scaled.changes) <= 12
