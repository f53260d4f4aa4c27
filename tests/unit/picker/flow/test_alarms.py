"""Waiting requests are considered again when they may be late or expire, and are forgotten when they go."""

from __future__ import annotations

from math import inf
from weakref import ref

import pytest

from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.alarms import Alarms
from tests.unit.picker.flow.a_fleet import SECOND, Ask, an_item, gateway, reasons


class Prompt(Ask):
    """A prompt that a weak reference can name."""


def test_a_request_that_becomes_late_is_refused_when_it_is_certain() -> None:
    gate = gateway(Flow(deadline_seconds=2.0))
    gate.offer(SECOND, now=0.0)
    gate.offer(Ask(900), now=0.0)
    gate.offer(Ask(900), now=0.0)  # after the one before it: 0.9 + 0.9 + 0.9 seconds
    gate.run(now=0.0, until=0.8)
    assert reasons(gate) == []
    gate.run(now=0.8, until=1.1)  # the latest moment at which it may start on an idle server
    assert reasons(gate) == ["deadline"]


def test_a_request_that_has_waited_for_its_ttl_is_refused() -> None:
    gate = gateway(Flow(ttl_seconds=9.0, ttl_by_priority={"7": 0.5}))
    gate.offer(Ask(3000), now=0.0)
    gate.offer(Ask(10), priority=7, now=0.0)
    gate.offer(Ask(10), priority=1, now=0.0)
    gate.run(now=0.0, until=1.0)
    assert reasons(gate) == ["ttl"]
    assert gate.refused[0][0].priority == 7


@pytest.mark.parametrize("how", ["leaves", "is pushed out", "goes", "is late"])
def test_nothing_keeps_the_prompt_of_a_request_that_waits_no_more(how: str) -> None:
    gate = gateway(Flow(per_tenant=WaitingSettings(max_requests=1), ttl_seconds=60.0))
    gate.offer(SECOND, now=0.0)
    gate.offer(SECOND, priority=5, now=0.0)
    gate.offer(SECOND, priority=-5, now=0.0)  # waits all the time
    payload = Prompt(1000)
    item = gate.offer(payload, ttft_s=2.5 if how == "is late" else None, now=0.0)
    kept = ref(payload)
    if how == "leaves":
        gate.flow.leave(item)
    elif how == "is pushed out":
        gate.flow.apply(Flow(per_tenant=WaitingSettings(max_requests=0), ttl_seconds=60.0), now=0.0)
        gate.pump(now=0.0)
    else:
        gate.run(now=0.0, until=2.5)
    gate.let_go.clear()
    gate.refused.clear()
    del payload, item
    assert kept() is None


def test_the_alarms_of_requests_that_left_are_removed() -> None:
    alarms: Alarms[Ask] = Alarms()
    waiting = [an_item(number, expires_at=1000.0 + number) for number in range(300)]
    for item in waiting:
        alarms.set(item, inf)
    assert alarms.due_at == 1000.0
    while waiting:
        alarms.forget(waiting.pop(0))
        alarms.check_integrity(waiting)
    assert alarms.due_at == inf
