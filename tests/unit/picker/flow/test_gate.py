"""How all waiting requests go when flow control ends: at a drain, or because the policy holds nothing any
more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from epp.base.errors import PickError
from epp.base.types import ApiKind, InferenceRequest
from epp.config.flow import Flow, WaitingSettings
from epp.config.policy import PolicySpec
from epp.config.routing import Cost
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.gate import FlowClaim, Gate, WaitingRequest
from epp.picker.picker import Picker
from epp.picker.unserved import UnservedRequest
from tests.unit.picker.picker_questions import a_picker, endpoints

MANY = 300
End = Callable[["WaitingRequests"], None]


class WaitingRequests:
    """A gate before one busy server, and the requests that wait there."""

    def __init__(self, requests: int) -> None:
        spec = PolicySpec(
            flow=Flow(mode="Hold", ttl_seconds=3600.0),
            cost=Cost(prefill_tokens_per_second=1.0),
        )
        self.picker: Picker = a_picker(spec, on=endpoints("a"))
        self.gate = Gate(self.picker)
        self.went: list[str] = []
        self.refused = 0
        self.pumps = 0
        assert isinstance(self.offer("first"), Pick)
        self.waiting: dict[str, WaitingRequest] = {}
        for n in range(requests):
            held = self.offer(f"r{n}")
            assert isinstance(held, WaitingRequest)
            self.waiting[f"r{n}"] = held

    def offer(self, name: str) -> Pick | WaitingRequest | UnservedRequest:
        def decided(pick: Pick | PickError, _: float) -> None:
            if isinstance(pick, Pick):
                self.went.append(name)
            else:
                self.refused += 1

        inference = InferenceRequest(kind=ApiKind.COMPLETIONS, model="m", prompt=name.encode() * 200)
        request = Question(request_id=name, inference=inference)
        return self.gate.offer(request, FlowClaim(), decided, size_bytes=10, longest_s=3600.0, now=1.0)

    def pump(self) -> None:
        """Call flow control as often as it asks for."""
        while self.gate.due_at <= 1.0:
            self.gate.pump(now=1.0)
            self.gate.check_integrity()
            self.pumps += 1


def drain(queue: WaitingRequests) -> None:
    queue.gate.drain(now=1.0)


def turn_off(queue: WaitingRequests) -> None:
    policy = queue.picker.policy
    queue.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=Flow())), now=1.0)
    queue.gate.pump(now=1.0)


ENDS = pytest.mark.parametrize("end", [drain, turn_off])


@ENDS
def test_a_long_queue_goes_in_order_and_in_portions(end: End) -> None:
    queue = WaitingRequests(MANY)
    end(queue)
    assert 0 < len(queue.went) < MANY / 3
    assert queue.gate.waiting == MANY - len(queue.went)
    queue.pump()
    assert queue.went == [*queue.waiting]
    assert 3 < queue.pumps < MANY / 5
    assert queue.gate.waiting == 0


@ENDS
def test_a_client_that_leaves_meanwhile_is_not_sent(end: End) -> None:
    queue = WaitingRequests(MANY)
    end(queue)
    queue.gate.leave(queue.waiting[f"r{MANY - 1}"])
    queue.pump()
    assert queue.went == [*queue.waiting][:-1]


def test_flow_control_that_is_on_again_holds_all_that_have_not_gone() -> None:
    queue = WaitingRequests(MANY)
    on = queue.picker.policy
    turn_off(queue)
    went = len(queue.went)
    queue.picker.set_policy(on, now=1.0)
    assert isinstance(queue.offer("new"), WaitingRequest)
    queue.pump()
    assert len(queue.went) == went < MANY
    assert queue.gate.waiting == MANY - went + 1


def test_requests_that_a_policy_pushed_out_are_told_so_at_a_drain_too() -> None:
    queue = WaitingRequests(MANY)
    policy = queue.picker.policy
    narrow = replace(policy.spec.flow, in_all=WaitingSettings(max_requests=0))
    queue.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=narrow)), now=1.0)
    with pytest.raises(PickError):
        queue.offer("new")
    drain(queue)
    queue.pump()
    assert queue.refused == MANY


def test_figures_show_the_requests_that_have_not_gone_yet() -> None:
    queue = WaitingRequests(MANY)
    turn_off(queue)
    shown = sum(count for status in queue.gate.status(now=1.0) for count in status.requests.values())
    assert shown == queue.gate.waiting > 0
