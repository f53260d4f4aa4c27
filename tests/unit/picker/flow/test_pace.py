"""The rates of tokens, and the figures that follow from them: Retry-After and the saturation."""

from __future__ import annotations

import pytest

from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.pace import Rate
from tests.unit.picker.flow.a_fleet import SECOND, Ask, gateway


def test_a_rate_counts_exactly_what_comes_within_a_moment() -> None:
    together, apart = Rate(), Rate()
    for n in range(1000):
        together.add(3.0, now=0.02 * n)
        if n % 5 == 0:
            apart.add(15.0, now=0.02 * n)
    assert together.per_s(now=20.0) == pytest.approx(150.0, rel=0.02)
    assert together.per_s(now=20.0) == pytest.approx(apart.per_s(now=20.0), rel=0.02)


def test_retry_after_is_the_time_in_which_the_queue_drains() -> None:
    gate = gateway(Flow(in_all=WaitingSettings(max_requests=10)))
    for n in range(30):  # a thousand tokens a second
        gate.offer(Ask(500), now=0.5 * n)
        gate.run(now=0.5 * n, until=0.5 * n)
    for _ in range(12):
        gate.offer(Ask(500), now=15.0)
    waited_s = 10 * 500 / 1000
    assert gate.refused[-1][1].retry_after_s == pytest.approx(waited_s, rel=0.3)


def test_saturation_is_0_if_idle_and_over_1_if_too_much_comes() -> None:
    gate = gateway(Flow(deadline_seconds=2.0))
    assert gate.flow.saturation(now=0.0) == 0.0
    for n in range(100):  # twice as much as the server can do
        gate.offer(Ask(500), now=0.25 * n)
        gate.run(now=0.25 * n, until=0.25 * n)
    assert 1.5 < gate.flow.saturation(now=25.0) < 2.5


def test_saturation_is_0_again_once_no_request_comes() -> None:
    gate = gateway(Flow(deadline_seconds=2.0))
    for _ in range(10):
        gate.offer(SECOND, now=0.0)
    gate.run(now=0.0, until=15.0)
    assert len(gate.refused) > 5
    assert gate.flow.saturation(now=15.0) == 0.0


def test_saturation_is_under_1_if_the_fleet_keeps_up() -> None:
    gate = gateway(Flow(deadline_seconds=2.0))
    for n in range(100):
        gate.offer(Ask(500), now=n + 0.0)
        gate.run(now=n + 0.0, until=n + 0.0)
    assert 0 < gate.flow.saturation(now=99.1) < 0.5
