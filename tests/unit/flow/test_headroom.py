"""How soon a server must be free before a request is sent to it."""

from __future__ import annotations

from epp.flow.flow_settings import FlowSettings
from tests.unit.flow.a_fleet import SECOND, Ask, gateway, learning, reasons


def test_a_request_whose_prompt_is_being_computed_goes_after_it_unless_another_waits_before() -> None:
    gate = gateway(FlowSettings(nearly_cached_s=0.05))
    gate.offer(SECOND, now=0.0)
    cached = gate.offer(Ask(400, home=0), now=0.0)
    assert gate.let_go[1:] == [cached]
    gate.offer(SECOND, now=0.0)
    gate.offer(Ask(400, home=0), now=0.0)
    gate.pump(now=0.0)
    assert gate.let_go[1:] == [cached]


def test_a_nearly_cached_request_waits_if_its_server_is_busy_for_longer_than_the_goal() -> None:
    gate = gateway(FlowSettings(nearly_cached_s=0.05, goal_s=0.5))
    gate.offer(SECOND, now=0.0)
    cached = gate.offer(Ask(400, home=0), now=0.0)
    assert cached.waits
    assert gate.run(now=0.0, until=0.6) == 0.6
    assert gate.let_go[1:] == [cached]


def test_a_request_is_not_sent_to_a_server_where_it_would_be_late() -> None:
    gate = learning(num_servers=2, ttft_s=2.0)
    gate.fleet.busy_until = [1.95, 2.0]
    assert gate.offer(Ask(1000), now=0.0).waits is False  # the request is refused
    assert reasons(gate) == ["deadline"]
    gate.offer(Ask(1000), now=1.0)
    gate.run(now=1.0, until=1.8)
    assert len(gate.let_go) == 1


def test_while_servers_are_too_few_requests_wait_here_and_not_at_them() -> None:
    gate = learning(ttft_s=2.0)
    for _ in range(3):
        gate.offer(SECOND, now=0.0)
    assert reasons(gate) == ["deadline"]
    item = gate.offer(Ask(500), now=1.0)
    assert item.waits, "its server is busy for another second"
    gate.run(now=1.0, until=1.75)
    assert gate.let_go[-1] is item


def test_a_request_that_is_refused_for_its_length_does_not_make_servers_too_few() -> None:
    gate = learning(ttft_s=2.0)
    gate.offer(Ask(3000), now=0.0)
    gate.offer(SECOND, now=0.0)
    assert reasons(gate) == ["deadline"]
    assert not gate.offer(Ask(500), now=0.0).waits
