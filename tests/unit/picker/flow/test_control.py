"""Which requests go at once, which wait, and which are refused; what flow control needs of a request."""

from math import inf

import pytest

from epp.config.flow import Flow
from epp.picker.flow.control import FlowControl, Forecast
from epp.picker.flow.queues import QueueItem
from tests.unit.picker.flow.a_fleet import SECOND, AFleet, Ask, FlowGateway, gateway, reasons


def test_a_request_for_a_busy_fleet_waits_until_the_headroom() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    second = gate.offer(SECOND, now=0.0)
    assert gate.pump(now=0.0) == 0
    assert gate.flow.due_at == pytest.approx(0.4)
    gate.run(now=0.0, until=0.45)
    assert gate.let_go[-1] is second
    assert gate.flow.due_at == inf


def test_no_request_overtakes_those_that_wait_though_a_server_is_free() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    first, second = gate.offer(SECOND, now=0.1), gate.offer(Ask(1), now=1.0)
    gate.pump(now=1.0)
    assert gate.let_go[1:] == [first]
    gate.run(now=1.0, until=2.0)
    assert gate.let_go[1:] == [first, second]


def test_a_draining_gateway_lets_all_go_in_order_and_holds_no_request() -> None:
    gate = gateway(Flow(deadline_seconds=3.0))
    gate.offer(SECOND, now=0.0)
    first, second = gate.offer(SECOND, now=0.0), gate.offer(SECOND, now=0.0)
    gate.flow.drain()
    newcomer = gate.offer(SECOND, now=0.0)
    gate.pump(now=0.0)
    assert gate.let_go[1:] == [newcomer, first, second]


def after_a_loss(of: str, tokens: int) -> FlowGateway:
    """Return a gateway where `greedy` had 4 of 5 requests of its priority, and one was refused as late."""
    gate = gateway(Flow(deadline_seconds=2.0))
    gate.offer(Ask(9000), priority=5, ttft_s=inf, now=0.0)
    for tenant in ("light", *["greedy"] * 4):
        gate.fleet.busy_until = [0.0]
        gate.offer(SECOND, tenant=tenant, now=0.0)
    gate.offer(Ask(tokens), tenant=of, now=0.0)
    gate.fleet.busy_until = [9.0]
    gate.run(now=0.0, until=1.5)
    assert (reasons(gate), len(gate.flow)) == (["deadline"], 0)
    return gate


@pytest.mark.parametrize("tokens", [1100, 900], ids=["refused at once", "refused after it waited"])
def test_a_greedy_tenant_leaves_room_after_another_was_refused(tokens: int) -> None:
    gate = after_a_loss("light", tokens)
    gate.fleet.busy_until = [2.0]
    greedy, light = (gate.offer(Ask(100), tenant=tenant, now=1.5) for tenant in ("greedy", "light"))
    gate.run(now=1.5, until=1.7)
    assert gate.let_go[6:] == [light, greedy]
    gate.fleet.busy_until = [2.4]
    gate.offer(SECOND, priority=-1, now=1.7)
    gate.fleet.busy_until = [2.2]
    urgent = gate.offer(SECOND, tenant="greedy", now=1.7)
    gate.pump(now=1.7)
    assert gate.let_go[8:] == [urgent], "the room would go to a lower priority"


@pytest.mark.parametrize(
    ("of", "tokens", "ttft_s", "now"),
    [
        ("greedy", 1100, 2.0, 1.5),
        ("light", 2100, 2.0, 1.5),
        ("light", 1100, inf, 1.5),
        ("light", 1100, 2.0, 5.1),
    ],
    ids=["it was its own loss", "no server could be in time", "it has no deadline", "it was long ago"],
)
def test_a_greedy_tenant_goes_as_others_do(of: str, tokens: int, ttft_s: float, now: float) -> None:
    gate = after_a_loss(of, tokens)
    gate.fleet.busy_until = [now + 0.5]
    gate.offer(Ask(100), tenant="greedy", ttft_s=ttft_s, now=now)
    assert len(gate.flow) == 0


def test_requests_that_leave_room_keep_no_other_one_from_an_idle_server() -> None:
    gate = after_a_loss("light", 1100)
    gate.fleet.busy_until = [2.05, 1.5]
    for _ in range(4):
        gate.offer(Ask(9000, home=0), tenant="greedy", ttft_s=20.0, now=1.5)
    anywhere = gate.offer(Ask(100), tenant="greedy", now=1.5)
    for now in (1.5, 1.501):
        gate.pump(now=now)
    assert gate.let_go[6:] == [anywhere]
    gate.flow.drain()
    gate.pump(now=1.501)
    assert len(gate.flow) == 0


def test_the_deadline_of_a_request_counts_before_that_of_the_policy() -> None:
    gate = gateway(Flow(deadline_seconds=0.5))
    gate.offer(SECOND, ttft_s=5.0, now=0.0)
    assert reasons(gate) == []


def test_waiting_requests_are_reported_by_priority() -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    for priority in (0, 0, 5):
        gate.offer(SECOND, priority=priority, now=0.25)
    status = gate.flow.status("m", now=0.5)
    assert (status.requests, status.tokens) == ({0: 2, 5: 1}, {0: 2000, 5: 1000})
    assert status.oldest_s == 0.25


@pytest.mark.parametrize("ttft_s", [None, 1.5], ids=["the server is busy", "it would be late"])
def test_a_request_that_does_not_go_at_once_is_not_charged(ttft_s: float | None) -> None:
    gate = gateway()
    gate.offer(SECOND, now=0.0)
    gate.offer(SECOND, tenant="t", ttft_s=ttft_s, now=0.0)
    assert "t" not in gate.flow.let_go_tokens


def test_request_waits_for_its_prefix_while_the_next_one_takes_idle_server() -> None:
    gate = gateway(num_servers=2)
    gate.offer(Ask(5000, home=0), now=0.0)  # half a second at server 0, which holds its prompt
    gate.fleet.busy_until = [1.5, 1.0]
    at_home, anywhere = gate.offer(Ask(9000, home=0), now=0.0), gate.offer(Ask(100), now=0.0)
    gate.run(now=0.0, until=0.6)
    assert gate.let_go[1:] == [anywhere]
    gate.run(now=0.6, until=1.0)
    assert gate.let_go[1:] == [anywhere, at_home]


def test_a_fleet_without_room_costs_no_forecasts() -> None:
    gate = gateway()
    gate.offer(Ask(10_000), now=0.0)
    for _ in range(200):
        gate.offer(SECOND, now=0.0)
    asked = gate.fleet.asked
    for n in range(100):
        gate.pump(now=0.01 * n)
    assert gate.fleet.asked == asked


@pytest.mark.parametrize(("busy_s", "most"), [(0.0, 160), (0.6, 12)], ids=["idle", "busy"])
def test_an_event_costs_four_forecasts_whatever_waits(busy_s: float, most: int) -> None:
    """All wait for server 0, while server 1 could begin with them. If it is idle, each of the first 160 is
    tried once in a tenth of a second. If it is still busy, the search takes its time.
    """
    gate = gateway(num_servers=2)
    gate.fleet.busy_until = [100.0, busy_s]
    for n in range(500):
        gate.offer(Ask(10**6, home=0), tenant=str(n % 5), now=0.0)
    asked = gate.fleet.asked
    for n in range(1, 101):
        assert gate.pump(now=0.001 * n) == 0
        assert gate.fleet.asked - asked <= 4 * n
    assert gate.fleet.asked - asked <= most


def test_a_request_that_waits_for_its_deadline_costs_a_few_forecasts() -> None:
    gate = gateway(Flow(deadline_seconds=5.0))
    gate.offer(Ask(4000), now=0.0)
    for _ in range(100):
        gate.offer(Ask(500), now=0.0)
    gate.run(now=0.0, until=10.0)
    assert len(gate.flow) == 0
    assert gate.fleet.asked <= 3 * 101


def test_a_request_with_nothing_to_compute_counts_as_one_token() -> None:
    flow, cached = FlowControl[Ask](Flow(), AFleet(1)), Forecast(1.0, 0.0, 0)
    item = flow.offer(SECOND, cached, priority=0, tenant="", size_bytes=0, left_s=2.0, longest_s=inf, now=3.0)
    assert isinstance(item, QueueItem)
    assert (item.payload, item.tokens) == (SECOND, 1)
