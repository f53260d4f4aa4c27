"""What flow control needs of a request, and the decisions that it makes about one."""

from __future__ import annotations

from math import inf
from typing import get_args

from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.control import FlowControl
from epp.picker.flow.queues import TenantFlow
from epp.picker.flow.request import Forecast, QueueItem, RefusedFor
from tests.unit.picker.flow.a_fleet import SECOND, gateway, reasons


class IdleServers:
    """Implements `Forecaster`, and reads nothing of a request."""

    def least_wait_s(self, *, now: float) -> float:
        return 0.0

    def forecast(self, payload: object, *, now: float) -> Forecast:
        return Forecast(0.0, 0.0, 0.0, 0)


def test_a_request_is_an_opaque_object_that_the_decision_returns() -> None:
    payload, servers = object(), IdleServers()
    flow: FlowControl[object] = FlowControl(Flow(), servers)

    def offer(wait_s: float) -> object:
        forecast = Forecast(wait_s, wait_s, 0.0, 0)
        return flow.offer(
            payload, forecast, priority=0, tenant="", size_bytes=0, left_s=2.0, longest_s=inf, now=3.0
        )

    item = offer(1.0)
    assert isinstance(item, QueueItem)
    assert item.payload is payload
    assert (item.arrived_at, item.deadline, item.expires_at) == (3.0, 5.0, 33.0)
    assert item.tokens == 1, "each request counts as one token at least"
    other = offer(0.0)
    assert isinstance(other, QueueItem), "another waits"
    assert [flow.next(now=3.0), flow.next(now=3.0)] == [(item, None), (other, None)]
    assert isinstance(offer(0.0), TenantFlow)


def test_requests_are_refused_for_each_of_the_reasons() -> None:
    gate = gateway(Flow(ttl_seconds=0.5, in_all=WaitingSettings(max_requests=1)))
    gate.offer(SECOND, now=0.0)
    gate.offer(SECOND, ttft_s=1.5, now=0.0)
    gate.offer(SECOND, now=0.0)
    gate.offer(SECOND, now=0.0)
    gate.run(now=0.0, until=0.6)
    assert reasons(gate) == ["deadline", "full", "ttl"]
    assert {*reasons(gate)} == {*get_args(RefusedFor)}
