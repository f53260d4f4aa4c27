"""Requests that wait for the first server of their model, at the gate."""

import dataclasses
from collections.abc import Sequence
from math import inf

import pytest
from msgspec.structs import replace

from epp.base.errors import FlowRefusedError, NoEndpointError, PickError
from epp.config.flow import Flow, WaitingSettings
from epp.config.policy import PolicySpec
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.gate import FlowClaim, Gate
from epp.picker.unserved import UnservedRequest
from tests.invariants.flow import check_gate
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, policy_of, text


class Empty:
    """A gate before a picker whose only server has gone."""

    def __init__(self, flow: Flow) -> None:
        gone = [dataclasses.replace(each, pool="pool") for each in endpoints("a", model="m")]
        self.picker = a_picker(PolicySpec(flow=flow), on=gone)
        self.gate = Gate(self.picker)
        self.fates: dict[str, Pick | PickError] = {}
        self.picker.news.set_endpoints([], now=0.0, pools=frozenset({"pool"}))

    def offer(
        self, name: str, *, model: str = "m", now: float = 1.0, longest_s: float = 600.0
    ) -> UnservedRequest:
        def decided(fate: Pick | PickError, _: float) -> None:
            self.fates[name] = fate

        claim, question = FlowClaim(), ask(text(name), model=model)
        held = self.gate.offer(question, claim, decided, size_bytes=100, longest_s=longest_s, now=now)
        assert isinstance(held, UnservedRequest)
        return held

    def pump(self, *, now: float) -> None:
        self.gate.pump(now=now)
        while self.gate.due_at <= now:
            self.gate.pump(now=now)
        check_gate(self.gate)

    def come(self, names: str, *, now: float) -> None:
        self.picker.news.set_endpoints(endpoints(names, model="m"), now=now)

    def went(self) -> Sequence[str]:
        return [name for name, fate in self.fates.items() if isinstance(fate, Pick)]


@pytest.mark.parametrize("mode", ["Direct", "Hold"])
def test_requests_go_in_order_when_the_first_server_is_ready(mode: str) -> None:
    pool = Empty(Flow(mode="Hold" if mode == "Hold" else "Direct", wait_for_server_seconds=60))
    names = [f"r{n}" for n in range(120)]
    for name in names:
        pool.offer(name)
    assert (pool.gate.waiting, pool.gate.unserved()) == (120, ["m"])
    pool.pump(now=30.0)
    assert pool.fates == {}
    pool.come("a", now=31.0)
    pool.gate.pump(now=31.0)
    assert 0 < len(pool.went()) < 120, "a portion in each turn"
    pool.pump(now=31.0)
    assert pool.went() == names
    assert {fate.decision.waited_s for fate in pool.fates.values() if isinstance(fate, Pick)} == {30.0}
    assert pool.gate.waiting == 0


def test_a_request_gets_its_error_when_it_has_waited_long_enough() -> None:
    pool = Empty(Flow(wait_for_server_seconds=60))
    pool.offer("patient")
    pool.offer("short", longest_s=10.0)  # the data plane waits no longer
    pool.pump(now=11.5)
    assert list(pool.fates) == ["short"]
    pool.pump(now=61.5)
    assert [fate.status for fate in pool.fates.values() if isinstance(fate, PickError)] == [503, 503]


def test_by_default_a_request_waits_while_a_server_starts() -> None:
    pool = Empty(Flow(ttl_seconds=20))
    pool.picker.starting = {"pool"}
    assert pool.picker.flow_decides
    for name in ("first", "second"):
        pool.offer(name)
    pool.pump(now=20.0)
    assert pool.fates == {}
    assert (pool.gate.waiting, pool.gate.unserved()) == (2, []), "a server comes anyway"
    pool.pump(now=21.5)
    assert [fate.status for fate in pool.fates.values() if isinstance(fate, PickError)] == [503, 503]
    pool.picker.starting = frozenset()
    with pytest.raises(NoEndpointError):
        pool.offer("third")


def test_a_starting_server_counts_for_models_of_its_pool_and_unknown_ones() -> None:
    pool = Empty(Flow())
    pool.picker.starting = {"other"}
    pool.offer("r", model="nobody-knows")
    with pytest.raises(NoEndpointError):
        pool.offer("s")
    pool.picker.starting = {"other", "pool"}
    pool.offer("t")


def test_the_least_wait_switches_the_waiting_for_a_starting_server_off() -> None:
    pool = Empty(Flow(wait_for_server_seconds=0.001))
    pool.picker.starting = {"pool"}
    pool.offer("r", now=1.0)
    pool.pump(now=1.001)
    assert isinstance(pool.fates["r"], NoEndpointError)


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
    pool.picker.set_policy(policy_of(replace(pool.picker.policy.spec, flow=Flow())))
    pool.come("a", now=3.0)
    pool.pump(now=3.0)
    assert pool.went() == ["r"]


def test_nothing_is_due_when_all_clients_have_left() -> None:
    pool = Empty(Flow(wait_for_server_seconds=60))
    held = [pool.offer(f"r{n}") for n in range(120)]
    for names, due_at in (("a", 0.0), ("", 61.0), ("a", 0.0)):  # in each turn with a server fifty go
        pool.come(names, now=2.0)
        pool.gate.pump(now=2.0)
        assert pool.gate.due_at == due_at
    for each in held:
        pool.gate.leave(each)
    check_gate(pool.gate)
    assert (pool.gate.waiting, pool.gate.due_at) == (0, inf)


def test_a_turn_tries_few_models_and_shows_few_whatever_clients_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, tried = Empty(Flow(wait_for_server_seconds=60)), list[str]()
    for n in range(500):
        pool.offer(f"r{n}", model=f"model-{n}")
    pick = pool.picker.pick

    def noted(question: Question, **times: float) -> Pick:
        tried.append(question.inference.model)
        return pick(question, **times)

    monkeypatch.setattr(pool.picker, "pick", noted)
    pool.gate.pump(now=2.0)
    assert 0 < len(tried) <= 50
    assert len(pool.gate.unserved()) <= 16
    for _ in range(100):
        pool.gate.pump(now=2.0)
    assert len(set(tried)) == 500, "each has its turn"


def test_requests_that_ended_are_forgotten_whatever_clients_name() -> None:
    pool = Empty(Flow(wait_for_server_seconds=60))
    held = [pool.offer(f"r{n}", model=f"model-{n % 7}") for n in range(100)]
    assert all(each.error.__traceback__ is None for each in held), "it would keep the stack"
    pool.pump(now=61.5)
    assert (pool.gate.waiting, pool.gate.unserved()) == (0, [])
