"""Which waiting request is found first, and how many forecasts this takes."""

from __future__ import annotations

from epp.flow.flow_settings import FlowSettings
from tests.unit.flow.a_fleet import SECOND, Ask, gateway


def test_a_request_waits_for_its_prefix_while_the_next_one_takes_the_idle_server() -> None:
    gate = gateway(num_servers=2)
    gate.offer(Ask(5000, home=0), now=0.0)  # half a second at server 0, which holds its prompt
    gate.fleet.busy_until[1] = 0.2
    at_home, anywhere = gate.offer(Ask(9000, home=0), now=0.0), gate.offer(Ask(100), now=0.0)
    gate.run(now=0.0, until=0.3)
    assert gate.let_go[1:] == [anywhere]
    gate.run(now=0.3, until=0.5)
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


def test_one_request_is_found_with_a_bounded_number_of_forecasts() -> None:
    gate = gateway(FlowSettings(forecasts_per_tenant=3, max_forecasts=5), num_servers=2)
    gate.fleet.busy_until[0] = 1.0
    for n in range(50):  # all wait for server 0, while server 1 is free
        gate.offer(Ask(100_000, home=0), tenant=str(n % 5), now=0.0)
    asked = gate.fleet.asked
    assert gate.pump(now=0.0) == 0
    assert gate.fleet.asked - asked <= 5 + 3
