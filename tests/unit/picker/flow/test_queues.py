"""The order of the waiting requests: by priority, by the tenants' shares, and within a tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from epp.config.flow import Flow
from epp.picker.flow.queues import OTHERS
from tests.unit.picker.flow.a_fleet import SECOND, Ask, gateway


def test_the_higher_priority_goes_first() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    batch = gate.offer(SECOND, priority=0, now=0.1)
    person = gate.offer(SECOND, priority=10, now=0.2)
    gate.run(now=0.2, until=3.0)
    assert gate.let_go[1:] == [person, batch]


def test_with_order_deadline_the_first_deadline_goes_first() -> None:
    gate = gateway(Flow(order="Deadline"))
    gate.offer(SECOND, now=0.0)
    patient, pressed = (gate.offer(Ask(100), ttft_s=ttft_s, now=0.0) for ttft_s in (9.0, 5.0))
    gate.run(now=0.0, until=2.0)
    assert gate.let_go[1:] == [pressed, patient]


@pytest.mark.parametrize("order", [("back", "busy"), ("busy", "back")], ids=["goes at once", "waits"])
def test_a_tenant_that_comes_back_has_saved_up_no_share(order: Sequence[str]) -> None:
    gate = gateway()
    gate.offer(Ask(100), tenant="back", now=0.0)
    for n in range(1, 20):
        gate.offer(Ask(100), tenant="busy", now=0.1 * n)
        gate.run(now=0.1 * n, until=0.1 * n)
    for _ in range(20):
        for tenant in order:
            gate.offer(Ask(100), tenant=tenant, now=2.0)
    gate.run(now=2.0, until=3.0)
    late = Counter(item.tenant for item in gate.let_go[20:])
    assert late["busy"] >= 4, late


def test_a_tenant_whose_only_request_waited_keeps_its_arrears() -> None:
    """The prompt is cached on a busy server, so another tenant goes first. The first tenant is then owed
    what the other got.
    """
    gate = gateway(num_servers=2)
    gate.fleet.busy_until = [3.0, 0.0]
    light = gate.offer(Ask(20_000, home=0), tenant="light", now=0.0)
    for n in range(3):
        gate.offer(SECOND, tenant="greedy", now=float(n))
        gate.pump(now=float(n))
    assert (len(gate.let_go), light.waits) == (3, True)
    gate.fleet.busy_until = [3.0, 3.0]
    gate.pump(now=3.0)
    assert not light.waits
    gate.fleet.busy_until = [4.0, 4.0]
    gate.offer(SECOND, tenant="greedy", now=3.5)
    owed = gate.offer(SECOND, tenant="light", now=3.6)
    gate.fleet.busy_until = [4.0, 9.0]
    gate.pump(now=4.0)
    assert gate.let_go[-1] is owed


def test_tenants_beyond_the_limit_share_one_queue() -> None:
    gate = gateway(Flow(max_tenants=2))
    for name in ("a", "b", "c", "d"):
        gate.offer(SECOND, tenant=name, now=0.0)
    waiting = [gate.offer(SECOND, tenant=name, now=0.0).tenant for name in ("a", "c", "e", "\0x")]
    assert waiting == ["a", OTHERS, OTHERS, OTHERS]
    gate.flow.check_integrity()


def test_tenants_that_need_not_wait_are_bounded() -> None:
    gate = gateway(Flow(max_tenants=2))
    kept = [gate.offer(SECOND, tenant=f"t{n}", now=10.0 * n).tenant for n in range(3)]
    assert kept == ["t0", "t1", OTHERS]


def test_a_tenant_with_a_tag_below_the_floor_makes_room() -> None:
    gate = gateway(Flow(max_tenants=2))
    gate.offer(Ask(10), tenant="a", now=0.0)
    for n in range(3):
        gate.offer(Ask(1000), tenant="b", now=float(n))
        gate.run(now=float(n), until=float(n))
    assert gate.offer(Ask(10), tenant="c", now=9.0).tenant == "c"


def test_priorities_beyond_the_limit_count_as_the_next_lower_one() -> None:
    gate = gateway()
    wanted = [0, 0, *range(10, 25), 5, 30, -1]
    kept = [gate.offer(SECOND, priority=p, now=0.0).priority for p in wanted]
    assert kept == [*wanted[:-3], 0, 24, 0]
