"""A new request that need not wait takes the short way. The tests check what is counted then, and when it
cannot take that way.
"""

from __future__ import annotations

from typing import Any

import pytest

from epp.flow.control import FlowControl
from epp.flow.pace import Rate
from epp.flow.queues import OTHERS
from epp.flow.settings import FlowSettings
from tests.unit.flow.a_fleet import AFleet, Ask, Gateway

SECOND = Ask(1000)


def gateway(**settings: Any) -> Gateway:
    fleet = AFleet(1)
    return Gateway(FlowControl(FlowSettings(**settings), fleet), fleet)


def passes(
    gate: Gateway, *, now: float, tenant: str = "t", ttft_s: float | None = None
) -> tuple[int, str] | None:
    forecast = gate.fleet.forecast(SECOND, now=now)
    flow = gate.flow.passes(forecast, priority=3, tenant=tenant, ttft_s=ttft_s, now=now)
    return None if flow is None else (flow.band.priority, flow.tenant)


def test_a_request_that_passes_is_charged_to_its_tenant_and_reported_to_other_pickers() -> None:
    gate = gateway()
    gate.flow.take_charges()
    assert passes(gate, now=0.0) == (3, "t")
    assert gate.flow.shares.tokens == {"t": 1000}
    assert gate.flow.take_charges() == {(3, "t", False): 1000}


@pytest.mark.parametrize("ttft_s", [None, 1.5], ids=["the server is busy", "it would be late"])
def test_a_request_that_does_not_pass_is_not_charged(ttft_s: float | None) -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    gate.fleet.take(SECOND, now=0.0)
    assert passes(gate, now=0.0, ttft_s=ttft_s) is None
    assert "t" not in gate.flow.shares.tokens


def test_no_request_passes_those_that_wait() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    assert gate.offer(SECOND, now=0.0).waits
    assert passes(gate, now=5.0) is None


def test_once_the_process_ends_everybody_passes() -> None:
    gate = gateway(ttft_s=0.5)
    gate.offer(Ask(400), now=0.0)
    gate.offer(Ask(50), now=0.0)
    gate.flow.drain()
    assert passes(gate, now=0.0) == (3, "t")


def test_tenants_that_pass_are_bounded() -> None:
    gate = gateway(max_tenants=2)
    kept = [passes(gate, tenant=f"t{n}", now=10.0 * n) for n in range(3)]
    assert kept == [(3, "t0"), (3, "t1"), (3, OTHERS)]


def test_a_tenant_whose_only_request_waited_keeps_what_it_had_less_than_others() -> None:
    """The prompt is cached on a busy server, so another tenant goes first. The first tenant is then owed
    what the other got.
    """
    gate = Gateway(FlowControl(FlowSettings(forecasts_per_tenant=8), fleet := AFleet(2)), fleet)
    fleet.busy_until = [3.0, 0.0]
    light = gate.offer(Ask(20_000, home=0), tenant="light", now=0.0)
    for n in range(3):
        gate.offer(SECOND, tenant="greedy", now=float(n))
        gate.pump(now=float(n))
    assert (len(gate.let_go), light.waits) == (3, True)
    fleet.busy_until = [3.0, 3.0]
    gate.pump(now=3.0)
    assert not light.waits
    fleet.busy_until = [4.0, 4.0]
    gate.offer(SECOND, tenant="greedy", now=3.5)
    owed = gate.offer(SECOND, tenant="light", now=3.6)
    fleet.busy_until = [4.0, 9.0]
    gate.pump(now=4.0)
    assert gate.let_go[-1] is owed


def test_a_rate_counts_what_comes_within_a_moment_as_exactly_as_what_comes_apart() -> None:
    together, apart = Rate(), Rate()
    for n in range(1000):
        together.add(3.0, now=0.02 * n)
        if n % 5 == 0:
            apart.add(15.0, now=0.02 * n)
    assert together.per_s(now=20.0) == pytest.approx(150.0, rel=0.02)
    assert together.per_s(now=20.0) == pytest.approx(apart.per_s(now=20.0), rel=0.02)
