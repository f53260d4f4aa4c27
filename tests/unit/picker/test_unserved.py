"""Requests that wait for the first server of their model, at the gate."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from epp.base.errors import FlowRefusedError, NoEndpointError, PickError
from epp.config.flow import Flow, WaitingSettings
from epp.config.policy import PolicySpec
from epp.picker.events import Pick
from epp.picker.gate import FlowClaim, Gate
from epp.picker.unserved import UnservedRequest
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, policy_of, text


class Empty:
    """A gate before a picker whose only server has gone."""

    def __init__(self, flow: Flow) -> None:
        self.picker = a_picker(PolicySpec(flow=flow), on=endpoints("a", model="m"))
        self.gate = Gate(self.picker)
        self.fates: dict[str, Pick | PickError] = {}
        self.picker.set_endpoints([], now=0.0, pools=frozenset({"pool"}))

    def offer(self, name: str, *, now: float = 1.0, longest_s: float = 600.0) -> UnservedRequest:
        def decided(fate: Pick | PickError, _: float) -> None:
            self.fates[name] = fate

        claim, question = FlowClaim(), ask(text(name), model="m")
        held = self.gate.offer(question, claim, decided, size_bytes=100, longest_s=longest_s, now=now)
        assert isinstance(held, UnservedRequest)
        return held

    def pump(self, *, now: float) -> None:
        self.gate.pump(now=now)
        while self.gate.due_at <= now:
            self.gate.pump(now=now)
        self.gate.check_integrity()

    def come(self, names: str, *, now: float) -> None:
        self.picker.set_endpoints(endpoints(names, model="m"), now=now)

    def went(self) -> Sequence[str]:
        return [name for name, fate in self.fates.items() if isinstance(fate, Pick)]


@pytest.mark.parametrize("mode", ["Direct", "Hold"])
def test_requests_go_in_order_when_the_first_server_is_ready(mode: str) -> None:
    pool = Empty(Flow(mode="Hold" if mode == "Hold" else "Direct", wait_for_server_seconds=60))
    names = [f"r{n}" for n in range(120)]
    for name in names:
        pool.offer(name)
    assert (pool.gate.waiting, pool.gate.unserved()) == (120, {"m": 120})
    pool.pump(now=30.0)
    assert pool.fates == {}
    pool.come("a", now=31.0)
    pool.gate.pump(now=31.0)
    assert 0 < len(pool.went()) < 120, "a portion in each turn"
    pool.pump(now=31.0)
    assert pool.went() == names
    assert pool.gate.waiting == 0


def test_a_request_gets_its_error_when_it_has_waited_long_enough() -> None:
    pool = Empty(Flow(wait_for_server_seconds=60))
    pool.offer("patient")
    pool.offer("short", longest_s=10.0)  # the data plane waits no longer
    pool.pump(now=11.5)
    assert list(pool.fates) == ["short"]
    pool.pump(now=61.5)
    assert [fate.status for fate in pool.fates.values() if isinstance(fate, PickError)] == [503, 503]


def test_without_the_setting_a_request_gets_its_error_at_once() -> None:
    pool = Empty(Flow(mode="Hold"))
    with pytest.raises(NoEndpointError):
        pool.offer("r")


def test_the_waiting_requests_and_their_bytes_are_bounded() -> None:
    for bounds in (WaitingSettings(max_requests=3), WaitingSettings(max_bytes=300)):
        pool = Empty(Flow(wait_for_server_seconds=60, in_all=bounds))
        held = [pool.offer(f"r{n}") for n in range(3)]
        with pytest.raises(FlowRefusedError):
            pool.offer("fourth")
        pool.gate.leave(held[0])
        pool.gate.leave(held[0])
        pool.offer("fifth")
        assert pool.gate.waiting == 3


def test_no_request_waits_any_longer_in_a_drain() -> None:
    pool = Empty(Flow(wait_for_server_seconds=60))
    pool.offer("r")
    pool.gate.drain(now=2.0)
    assert isinstance(pool.fates["r"], NoEndpointError)
    assert pool.gate.waiting == 0


def test_another_policy_may_come_while_requests_wait() -> None:
    pool = Empty(Flow(wait_for_server_seconds=60))
    pool.offer("r")
    pool.picker.set_policy(policy_of(replace(pool.picker.policy.spec, flow=Flow())), now=2.0)
    pool.come("a", now=3.0)
    pool.pump(now=3.0)
    assert pool.went() == ["r"]
