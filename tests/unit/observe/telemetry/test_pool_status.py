"""The numbers that an autoscaler follows, over all servers of a base model."""

from typing import Any

import pytest

from epp.base.types import EndpointName
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.flow.accounts import FlowStatus
from tests.unit.observe.telemetry.records import HERE


def server(
    name: str,
    *,
    backlog: float = 0.0,
    rate: float = 1000.0,
    kv: float | None = 0.0,
    model: str = "m",
    pool: str = "",
    ready: bool = True,
    computed: float = 0.0,
    running: int | None = None,
) -> EndpointStatus:
    return EndpointStatus(
        name=EndpointName(name),
        address=HERE.text,
        model=model,
        pool=pool,
        backlog_tokens=backlog,
        computed_tokens_per_s=computed,
        prefill_tokens_per_s=rate,
        kv_usage=kv,
        running=running,
        ready=ready,
    )


def flow_status(tokens: int, *, model: str = "m") -> FlowStatus:
    return FlowStatus(model=model, oldest_s=0.0, requests={0: 1}, tokens={0: tokens})


def pools(*servers: EndpointStatus, **of_picker: Any) -> list[PoolStatus]:
    return pools_of(PickerStatus(endpoints=servers, **of_picker))


def test_undone_work_counts_in_seconds_of_all_servers_together() -> None:
    (pool,) = pools(server("a", backlog=3000), server("b", rate=2000), flow=[flow_status(600)], goal_s=2.0)
    assert (pool.servers, pool.waiting_s) == (2, {"servers": 1.0, "queue": 0.2})
    assert pool.saturation == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("servers", "busy", "saturation"),
    [
        ([server("a", kv=0.9), server("b", kv=0.7), server("c", kv=None)], 0.0, 0.8),
        ([server("a", kv=0.9, running=0), server("b", kv=0.6, running=1)], 0.0, 0.3),
        ([server("a", computed=900), server("b", computed=300)], 0.6, 0.6),
        ([server("a", computed=1e15), server("b"), server("c"), server("d")], 0.25, 0.25),
        ([server("a", backlog=4000)], 0.0, 2.0),
        ([server("a", backlog=4000), server("b")], 0.0, 1.0),
    ],
    ids=[
        "full caches",
        "prefixes of an idle server",
        "busy servers",
        "impossible counters",
        "undone work",
        "twice as many servers",
    ],
)
def test_the_saturation_is_the_largest_of_three_shares(
    servers: list[EndpointStatus], busy: float, saturation: float
) -> None:
    (pool,) = pools(*servers, goal_s=2.0)
    assert pool.busy == busy
    assert pool.saturation == pytest.approx(saturation)


def test_servers_that_take_no_requests_are_not_counted() -> None:
    servers = [server("a", backlog=500), server("gone", ready=False), server("x", model="other", backlog=100)]
    found = pools(*servers, flow=[flow_status(100, model="other")], goal_s=1.0)
    assert {p.model: (p.servers, p.saturation) for p in found} == {"m": (1, 0.5), "other": (1, 0.2)}


def test_a_model_without_a_server_has_no_pool() -> None:
    assert pools(server("gone", ready=False), flow=[flow_status(100)], goal_s=1.0) == []


def test_a_model_whose_requests_wait_for_a_server_is_saturated() -> None:
    found = pools(server("a"), unserved=["m", "other"], goal_s=1.0)
    assert {p.model: (p.servers, p.saturation) for p in found} == {"m": (1, 0.0), "other": (0, 1.0)}


def test_two_pools_of_one_model_share_the_waiting_requests() -> None:
    servers = [
        server("a", pool="old", backlog=500),
        server("b", pool="new", rate=3000),
        server("x", model="n"),
    ]
    found = pools(*servers, flow=[flow_status(800)], goal_s=1.0)
    assert [(p.model, p.pool, p.servers, *p.waiting_s.values()) for p in found] == [
        ("m", "old", 1, 0.5, 0.2),
        ("m", "new", 1, 0.0, 0.2),
        ("n", "", 1, 0.0, 0.0),
    ]
