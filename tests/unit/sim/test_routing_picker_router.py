"""The real picker inside the simulated fleet. It hears of everything that happens, and nothing stays
booked.
"""

from __future__ import annotations

import random

import pytest

from bench.routing.bench import shape_of
from bench.routing.picker_router import PickerRouter
from bench.routing.workloads import SPECS, OpenLoop
from epp.config.policy import DEFAULT_POLICY
from epp.picker.prefix_index.integrity import check_integrity
from model_server.sim.fleet import Change, Fleet, FleetPlan


def a_run(*, replicas: int = 1, changes: tuple[Change, ...] = ()) -> tuple[PickerRouter, Fleet]:
    spec = SPECS["b2b"]
    assert spec.make is not None
    router = PickerRouter(DEFAULT_POLICY, seed=3, replicas=replicas)
    plan = FleetPlan(shape=shape_of(spec), num_servers=3, num_scrapers=replicas, changes=changes)
    workload = OpenLoop(spec.make(random.Random(3), 120), rate_per_s=3.0)
    return router, Fleet(plan, router=router, workload=workload, rng=random.Random(3))


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "changes", [(), (Change(at_s=15.0, restart="pod-1"), Change(at_s=20.0, add="pod-9"))]
)
def test_everything_booked_is_released(replicas: int, changes: tuple[Change, ...]) -> None:
    router, fleet = a_run(replicas=replicas, changes=changes)
    outcome = fleet.run()
    assert len(outcome.records) == 120
    for picker in router.pickers:
        picker.fleet.check_integrity()
        check_integrity(picker.caches.table)
        assert all(state.in_flight == 0 for state in picker.fleet.states())


def test_the_picker_learns_the_servers_speed_from_their_pages() -> None:
    router, fleet = a_run()
    fleet.run()
    rates = [state.tokens_per_s for state in router.pickers[0].fleet.states()]
    assert all(2000 < rate < 8000 for rate in rates), (
        "below the rate of an empty context, because prompts are long"
    )


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


def test_the_pickers_table_has_the_capacity_of_each_server() -> None:
    router, fleet = a_run()
    fleet.run()
    table = router.pickers[0].caches.table
    for name, engine in fleet.engines.items():
        mirror = next(n for n in table.mirrors if n == name)
        capacity_bytes = engine.shape.capacity_tokens * 4
        assert table.mirrors[mirror].capacity_bytes == pytest.approx(capacity_bytes, rel=0.05)
