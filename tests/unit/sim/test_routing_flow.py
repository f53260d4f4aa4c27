"""Flow control in the simulator."""

import pytest

from bench.routing.bench import Run, Setting
from bench.routing.flow import SETTINGS, outcome_of, row_of
from model_server.sim.fleet import Outcome

CAPACITY_PER_S = 3.0
"""About as much of workload `none` as two servers can do."""


def served(flow: str, load: float) -> Outcome:
    setting = Setting(num_servers=2, scale=0.1)
    run = Run(workload="none", rule="", load=load, seed=1, setting=setting, capacity_per_s=CAPACITY_PER_S)
    return outcome_of(run, SETTINGS[flow])


@pytest.mark.slow
@pytest.mark.parametrize("flow", list(SETTINGS))
def test_every_request_is_served_or_refused_and_a_run_repeats_itself(flow: str) -> None:
    first, again = served(flow, 2.0), served(flow, 2.0)
    assert repr(first) == repr(again)
    assert row_of(first) == row_of(again)
    assert len(first.records) == 200
    for record in first.records:
        assert record.completed == bool(record.server), "neither served nor refused"
    refused = sum(not record.server for record in first.records)
    assert (refused > 0) == (flow == "refuse")


@pytest.mark.slow
def test_flow_control_changes_nothing_if_a_server_is_always_free() -> None:
    off, on = (served(name, 0.05) for name in ("off", "queue"))
    assert [r.arrived_s for r in on.records] == [r.arrived_s for r in off.records]
    assert all(record.completed for record in on.records)
