"""The gate: how waiting requests go when flow control ends, forecasts of a model's queue, and claims."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from epp.base.errors import PickError
from epp.config.flow import Flow, WaitingSettings
from epp.config.policy import Chunks, Cost, PolicySpec
from epp.picker.events import Pick
from epp.picker.flow.queues import QueueItem
from epp.picker.gate import FlowClaim, Gate, HeldRequest, ModelQueue, WaitingRequest
from epp.picker.picker import Picker
from epp.picker.unserved import UnservedRequest
from epp.protocol.asking import read_head, request_names
from epp.protocol.header_names import TTFT_MS
from tests.invariants.flow import check_gate
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, text
from tests.unit.protocol.stream_bench import Bench

MANY = 300
End = Callable[["WaitingRequests"], None]


class WaitingRequests:
    """A gate before one busy server, and the requests that wait there."""

    def __init__(self, requests: int, *, server_s: float = 0.0) -> None:
        spec = PolicySpec(
            flow=Flow(mode="Hold", ttl_seconds=3600.0, wait_for_server_seconds=server_s),
            cost=Cost(prefill_tokens_per_second=1.0),
        )
        self.picker: Picker = a_picker(spec, on=endpoints("a", model="m"))
        self.gate = Gate(self.picker)
        self.went: list[str] = []
        self.refused = 0
        self.pumps = 0
        assert isinstance(self.offer("first"), Pick)
        self.waiting: dict[str, WaitingRequest] = {}
        for n in range(requests):
            held = self.offer(f"r{n}")
            assert isinstance(held, QueueItem)
            self.waiting[f"r{n}"] = held

    def offer(
        self, name: str, *, ttft_s: float | None = None, now: float = 1.0
    ) -> Pick | WaitingRequest | UnservedRequest:
        def decided(pick: Pick | PickError, _: float) -> None:
            if isinstance(pick, Pick):
                self.went.append(name)
            else:
                self.refused += 1

        request, claim = ask(name.encode() * 200), FlowClaim(ttft_s=ttft_s)
        return self.gate.offer(request, claim, decided, size_bytes=10, longest_s=3600.0, now=now)

    def pump(self) -> None:
        """Call flow control as often as it asks for."""
        while self.gate.due_at <= 1.0:
            self.gate.pump(now=1.0)
            check_gate(self.gate)
            self.pumps += 1


def drain(queue: WaitingRequests) -> None:
    queue.gate.drain(now=1.0)


def turn_off(queue: WaitingRequests, **others: Any) -> None:
    policy = queue.picker.policy
    queue.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=Flow(), **others)))
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
    queue.picker.set_policy(on)
    assert isinstance(queue.offer("new"), QueueItem)
    queue.pump()
    assert len(queue.went) == went < MANY
    assert queue.gate.waiting == MANY - went + 1


def test_prompts_that_wait_while_a_policy_cuts_prompts_anew_are_cut_anew() -> None:
    queue = WaitingRequests(1)
    turn_off(queue, chunks=Chunks(size_bytes=300))
    caches = queue.picker.caches
    assert caches.table.match(caches.chain(ask(b"r0" * 200).inference)) == {"a": 1}


def test_requests_that_a_policy_pushed_out_are_answered_at_a_drain_too() -> None:
    queue = WaitingRequests(MANY)
    policy = queue.picker.policy
    narrow = replace(policy.spec.flow, in_all=WaitingSettings(max_requests=0))
    queue.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=narrow)))
    with pytest.raises(PickError):
        queue.offer("new")
    queue.gate.leave(queue.waiting["r0"])
    queue.gate.pump(now=1.0)
    assert 0 < queue.refused < MANY / 3, "in portions"
    drain(queue)
    queue.pump()
    assert queue.refused == MANY - 1, "the first one's client has left"


@pytest.mark.parametrize(("server_s", "refused"), [(60.0, 0), (0.001, 3), (0.0, 3)])
def test_held_requests_wait_for_the_next_server_if_the_policy_says_so(server_s: float, refused: int) -> None:
    queue = WaitingRequests(3, server_s=server_s)
    [before] = queue.gate.status(now=1.0)
    queue.picker.news.set_endpoints([], now=1.0)
    queue.pump()
    queue.gate.pump(now=1.9)
    assert (queue.refused, queue.gate.waiting) == (refused, 3 - refused)
    assert queue.gate.unserved() == ["m"][refused:]
    [after] = queue.gate.status(now=1.9)
    assert sum(after.let_go_tokens.values()) - sum(before.let_go_tokens.values()) <= refused, "not sent"
    queue.picker.news.set_endpoints(endpoints("a", model="m"), now=2.0)
    queue.gate.pump(now=2.5)
    assert queue.went == ["r0"][refused:]


def test_no_request_waits_for_a_server_beyond_its_deadline() -> None:
    queue = WaitingRequests(0, server_s=3600.0)
    queue.offer("urgent", ttft_s=1000.0)
    queue.picker.news.set_endpoints([], now=1.0)
    for now, refused in ((1000.9, 0), (1001.1, 1)):
        queue.gate.pump(now=now)
        assert (queue.refused, queue.gate.waiting) == (refused, 1 - refused)


def test_the_wait_for_a_server_begins_anew_when_another_server_has_left() -> None:
    queue = WaitingRequests(1, server_s=60.0)
    queue.picker.news.set_endpoints([], now=1.0)
    queue.pump()
    new = queue.offer("new")
    assert isinstance(new, UnservedRequest)
    assert queue.gate.unserved() == ["m"], "once, whoever waits for it"
    for waiting in (new, queue.waiting["r0"]):
        queue.gate.leave(waiting)
    queue.picker.news.set_endpoints(endpoints("a", model="m"), now=20.0)
    assert [type(queue.offer(name, now=100.0)) for name in ("goes", "waits")] == [Pick, QueueItem]
    queue.gate.pump(now=100.0)
    queue.picker.news.set_endpoints([], now=101.0)
    queue.gate.pump(now=102.0)
    assert (queue.refused, queue.gate.waiting) == (0, 1)


def test_figures_show_the_requests_that_have_not_gone_yet() -> None:
    queue = WaitingRequests(MANY)
    turn_off(queue)
    shown = sum(count for status in queue.gate.status(now=1.0) for count in status.requests.values())
    assert shown == queue.gate.waiting > 0


RATE = 100.0
"""Prompt tokens that each server computes in a second."""


def busy_picker(spec: PolicySpec | None = None, *, busy: int) -> Picker:
    """Return a picker of two servers. The first `busy` servers in turn each have one request."""
    picker = a_picker(
        spec or PolicySpec(rule="round-robin", cost=Cost(prefill_tokens_per_second=RATE)),
        on=endpoints("ab", model="m"),
    )
    for n in range(busy):
        picker.pick(ask(text(f"busy {n}")), now=0.0)
    return picker


def _never(*_: object) -> None:
    raise AssertionError("no request is decided")


def test_the_figures_of_all_servers_follow_from_their_backlogs() -> None:
    picker = busy_picker(busy=1)
    queue = ModelQueue(picker, "m", Flow())
    assert queue.least_wait_s(now=0.0) == 0.0, "one server is idle"
    picker.pick(ask(text("another")), now=0.0)
    assert queue.least_wait_s(now=0.0) > 0.0
    assert ModelQueue(picker, "absent", Flow()).least_wait_s(now=0.0) == 0.0, "no server has it"


def test_a_server_in_time_takes_a_request_of_a_late_first_choice() -> None:
    picker = busy_picker(busy=2)
    picker.pick(ask(text("third", 80_000)), now=0.0)
    picker.pick(ask(text("fourth")), now=0.0)
    queue, request = ModelQueue(picker, "m", Flow()), ask(text("new"))
    prompt = picker.caches.prompt(request.inference, base_model="m", body_bytes=0)
    held = HeldRequest(request, prompt, picker.caches.table, queue, _never)
    urgent = queue.forecast(held, left_s=100.0, now=0.0)
    assert urgent.wait_s + urgent.own_s < 100.0, "server b has less to do"
    assert urgent.own_s == pytest.approx(urgent.tokens / RATE, abs=1 / RATE)
    decision = picker.commit(urgent.choice, now=0.0).decision
    assert (decision.chosen, decision.reason) == ("b", "deadline")
    assert decision.prompt_tokens - decision.matched_tokens == pytest.approx(urgent.tokens, abs=1)


def test_a_stored_object_makes_a_request_late_if_its_server_is() -> None:
    flow, request = Flow(mode="Hold", deadline_seconds=30.0), ask(text("new"))
    picker = busy_picker(PolicySpec(flow=flow, cost=Cost(prefill_tokens_per_second=RATE)), busy=0)
    gate = Gate(picker)
    offer: Any = {"decided": _never, "size_bytes": 1, "longest_s": inf, "now": 0.0}
    picker.on_made(picker.pick(ask(text("made")), now=0.0), "resp_1", now=0.0)
    with pytest.raises(PickError, match="the first token would come too late"):
        gate.offer(replace(request, names_state="resp_1"), FlowClaim(), **offer)
    assert isinstance(gate.offer(request, FlowClaim(), **offer), Pick), "the other server is in time"


def test_people_see_the_tenants_with_most_tokens_and_others_under_one_name() -> None:
    flow = Flow(mode="Hold", max_tenants=1)
    picker = busy_picker(PolicySpec(flow=flow, cost=Cost(prefill_tokens_per_second=RATE)), busy=2)
    gate = Gate(picker)
    for tenant, size in (("a", 4000), ("b", 8000), ("c", 8000)):
        claim, request = FlowClaim(tenant=tenant), ask(text(tenant, size))
        gate.offer(request, claim, _never, size_bytes=size, longest_s=inf, now=0.0)
    [status] = gate.status(now=0.0)
    assert [(of.tenant, of.requests) for of in status.tenants] == [("(others)", 2), ("a", 1)]
    assert status.requests == {0: 3}
    assert status.tokens == {0: sum(of.tokens for of in status.tenants)}


NAMES = ("x-llm-d-inference-objective", "x-gateway-inference-objective", TTFT_MS, "who")


def removed(flow: Flow) -> set[str]:
    """Return the names of the headers that are removed, after a look at which of them are read."""
    picker = Bench(flow=flow).picker
    spec, read = picker.policy.spec, picker.flow_read
    assert request_names(spec, flow=read).issuperset(NAMES) == (flow.mode == "Hold")
    return {*read_head([(name, "1") for name in NAMES], spec, flow=read).reserved}


def test_a_claim_that_the_policy_does_not_trust_does_not_reach_a_server() -> None:
    """The name of a tenant is not removed: it may be a secret, such as the value of authorization."""
    assert removed(Flow(mode="Hold", claims=(), tenant_header="who")) == {*NAMES[:3]}
    assert removed(Flow(mode="Hold", claims=("Objective",), tenant_header="who")) == {TTFT_MS}
    assert removed(Flow(mode="Hold", tenant_header="who")) == set()
    assert removed(Flow(tenant_header="who")) == set(), "flow control is off"


@pytest.mark.parametrize("name", ["x" * 300, "é" * 5000])
def test_a_long_name_of_a_tenant_is_replaced_by_a_short_digest(name: str) -> None:
    picker = Bench(flow=Flow(mode="Hold", tenant_header="who")).picker
    claim = read_head([("who", name)], picker.policy.spec, flow=picker.flow_read).claim
    assert 0 < len(claim.tenant) <= 256
    assert not name.startswith(claim.tenant)
