"""The waiting requests: their order, their bounds, and their alarms."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import inf
from weakref import ref

import pytest

from epp.config.flow import Flow, WaitingSettings
from epp.picker.flow.queues import OTHERS, Alarms, QueueItem
from tests.harness.steps import steps
from tests.invariants.flow import check_alarms, check_flow
from tests.unit.picker.flow.a_fleet import SECOND, Ask, an_item, gateway, reasons


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
    check_flow(gate.flow)


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


# -- bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        Flow(in_all=WaitingSettings(max_requests=2)),
        Flow(per_tenant=WaitingSettings(max_requests=2)),
        Flow(in_all=WaitingSettings(max_bytes=25)),
    ],
    ids=["in all", "of a tenant", "in bytes"],
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
    check_flow(gate.flow)


def test_a_smaller_bound_sheds_the_requests_beyond_it() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    waiting = [gate.offer(SECOND, priority=n, now=0.0) for n in (3, 1, 2)]
    gate.flow.apply(Flow(in_all=WaitingSettings(max_requests=1)), now=0.0)
    gate.pump(now=0.0)
    assert [item for item, _ in gate.refused] == [waiting[1], waiting[2]]


def test_a_smaller_bound_costs_the_same_for_each_request_beyond_it() -> None:
    costs, narrow = [], Flow(in_all=WaitingSettings(max_requests=0), max_tenants=1000)
    for count in (100, 400):
        gate = gateway(Flow(max_tenants=1000))
        for tenant in range(count):
            gate.offer(SECOND, tenant=str(tenant), now=0.0)
        costs.append(steps(partial(gate.flow.apply, narrow, now=0.0)))
    assert costs[1] < 6 * costs[0]


# -- alarms --------------------------------------------------------------------------------------------------


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
    alarms: Alarms[QueueItem[Ask]] = Alarms()
    waiting = [an_item(number, expires_at=1000.0 + number) for number in range(300)]
    for item in waiting:
        alarms.set(item, inf)
    assert alarms.due_at == 1000.0
    while waiting:
        alarms.forget(waiting.pop(0))
        check_alarms(alarms, waiting)
    assert alarms.due_at == inf
