"""How many requests may wait, and which of them is removed when there are too many."""

from __future__ import annotations

import pytest

from epp.config.flow import Flow, WaitingSettings
from tests.unit.picker.flow.a_fleet import SECOND, gateway, reasons


@pytest.mark.parametrize(
    "settings",
    [
        Flow(in_all=WaitingSettings(max_requests=2)),
        Flow(per_priority=WaitingSettings(max_requests=2)),
        Flow(per_tenant=WaitingSettings(max_requests=2)),
        Flow(in_all=WaitingSettings(max_bytes=25)),
    ],
    ids=["in all", "of a priority", "of a tenant", "in bytes"],
)
def test_at_a_bound_the_new_request_is_refused_if_no_other_is_worth_less(settings: Flow) -> None:
    gate = gateway(settings)
    gate.offer(SECOND, now=0.0)
    waiting = [gate.offer(SECOND, size_bytes=10, now=0.0) for _ in range(3)]
    assert reasons(gate) == ["full"]
    assert gate.refused[0][0] is waiting[2]


def test_at_a_bound_the_lowest_priority_is_shed_first() -> None:
    gate = gateway(Flow(in_all=WaitingSettings(max_requests=4)))
    gate.offer(SECOND, now=0.0)
    low = gate.offer(SECOND, priority=-1, tenant="light", now=0.0)
    greedy = [gate.offer(SECOND, tenant="greedy", now=0.0) for _ in range(3)]
    gate.offer(SECOND, tenant="light", now=0.0)
    gate.offer(SECOND, tenant="light", now=0.0)
    gate.pump(now=0.0)
    assert [item for item, _ in gate.refused] == [low, greedy[2]]


def test_no_request_is_shed_for_a_new_one_that_is_refused_in_the_end() -> None:
    gate = gateway(Flow(in_all=WaitingSettings(max_bytes=100)))
    gate.offer(SECOND, now=0.0)
    for priority in (0, 2):
        gate.offer(SECOND, priority=priority, size_bytes=50, now=0.0)
    large = gate.offer(SECOND, priority=1, size_bytes=90, now=0.0)
    gate.pump(now=0.0)
    assert [item for item, _ in gate.refused] == [large]
    assert len(gate.flow) == 2
    gate.flow.check_integrity()


def test_a_smaller_bound_sheds_the_requests_beyond_it() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    waiting = [gate.offer(SECOND, priority=n, now=0.0) for n in (3, 1, 2)]
    gate.flow.apply(Flow(in_all=WaitingSettings(max_requests=1)), now=0.0)
    gate.pump(now=0.0)
    assert [item for item, _ in gate.refused] == [waiting[1], waiting[2]]


def test_a_client_that_leaves_frees_its_place() -> None:
    gate = gateway(Flow(in_all=WaitingSettings(max_requests=1)))
    gate.offer(SECOND, now=0.0)
    first = gate.offer(SECOND, now=0.0)
    gate.flow.leave(first)
    gate.flow.leave(first)
    gate.offer(SECOND, now=0.0)
    assert reasons(gate) == []
    gate.run(now=0.0, until=5.0)
    assert first not in gate.let_go
