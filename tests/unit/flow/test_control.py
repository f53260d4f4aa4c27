"""Which requests go at once, which wait, and which are refused."""

from __future__ import annotations

from math import inf

import pytest

from epp.flow.flow_settings import FlowSettings
from tests.unit.flow.a_fleet import SECOND, Ask, gateway, passes, reasons


def test_a_request_for_an_idle_server_goes_at_once() -> None:
    gate = gateway()
    item = gate.offer(SECOND, now=0.0)
    assert gate.let_go == [item]
    assert gate.flow.due_at == inf


def test_a_request_for_a_busy_fleet_waits_until_the_headroom() -> None:
    gate = gateway(FlowSettings(headroom_s=0.25))
    gate.offer(SECOND, now=0.0)
    second = gate.offer(SECOND, now=0.0)
    assert gate.pump(now=0.0) == 0
    assert gate.flow.due_at == pytest.approx(0.75)
    gate.run(now=0.0, until=0.8)
    assert gate.let_go[-1] is second


def test_no_request_overtakes_those_that_wait_even_if_a_server_is_free_by_now() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    first, second = gate.offer(SECOND, now=0.1), gate.offer(Ask(1), now=1.0)
    gate.pump(now=1.0)
    assert gate.let_go[1:] == [first]
    gate.run(now=1.0, until=2.0)
    assert gate.let_go[1:] == [first, second]


def test_a_draining_gateway_lets_all_go_in_order_and_holds_no_request() -> None:
    gate = gateway(FlowSettings(ttft_s=3.0))
    gate.offer(SECOND, now=0.0)
    first, second = gate.offer(SECOND, now=0.0), gate.offer(SECOND, now=0.0)
    gate.flow.drain()
    newcomer = gate.offer(SECOND, now=0.0)
    gate.pump(now=0.0)
    assert gate.let_go[1:] == [newcomer, first, second]


def test_a_request_that_cannot_be_in_time_is_refused_at_once() -> None:
    gate = gateway(FlowSettings(ttft_s=2.0))
    gate.offer(Ask(1500), now=0.0)
    gate.offer(Ask(1000), now=0.0)
    assert reasons(gate) == ["deadline"]
    assert len(gate.flow) == 0


def test_the_deadline_of_a_request_counts_before_that_of_the_policy() -> None:
    gate = gateway(FlowSettings(ttft_s=0.5))
    gate.offer(SECOND, ttft_s=5.0, now=0.0)
    assert reasons(gate) == []


def test_waiting_requests_are_reported_by_priority() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    for priority, size in ((0, 10), (0, 20), (5, 30)):
        gate.offer(SECOND, priority=priority, size_bytes=size, now=0.5)
    told = gate.flow.waiting()
    assert {p: (w.requests, w.size_bytes, w.tokens) for p, w in told.items()} == {
        0: (2, 30, 2000),
        5: (1, 30, 1000),
    }
    assert gate.flow.oldest_s(now=0.75) == 0.25


def test_no_request_passes_those_that_wait() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    assert gate.offer(SECOND, now=0.0).waits
    assert passes(gate, now=5.0) is None


def test_every_request_passes_once_the_process_ends() -> None:
    gate = gateway(FlowSettings(ttft_s=0.5))
    gate.offer(Ask(400), now=0.0)
    gate.offer(Ask(50), now=0.0)
    gate.flow.drain()
    assert passes(gate, now=0.0) == (3, "t")


@pytest.mark.parametrize("ttft_s", [None, 1.5], ids=["the server is busy", "it would be late"])
def test_a_request_that_does_not_pass_is_not_charged(ttft_s: float | None) -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    gate.fleet.take(SECOND, now=0.0)
    assert passes(gate, now=0.0, ttft_s=ttft_s) is None
    assert "t" not in gate.flow.shares.tokens
