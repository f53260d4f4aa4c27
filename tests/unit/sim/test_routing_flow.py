"""Flow control in the simulator: requests wait at the gate, and the workloads for flow control have the
promised properties.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.routing.bench import Run, Setting, simulate
from bench.routing.flow import SETTINGS, Place, Row, outcome_of, row_of
from bench.routing.more_workloads import MORE, UNTUNED
from bench.routing.workloads import Timed
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
