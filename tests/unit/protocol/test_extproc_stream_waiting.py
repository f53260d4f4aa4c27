"""A request that flow control holds: the messages to the data plane in each body mode."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from epp.protocol.http_events import Delay, Modes, Refuse, Slot, StreamProtocolError
from tests.invariants.protocol import check_stream
from tests.unit.protocol.stream_bench import (
    BODY,
    BUFFERED,
    DUPLEX,
    GRPC,
    NONE,
    OK,
    PARTIAL,
    STREAMED,
    echoed,
    head,
    refused,
    request_body,
    request_trailers,
    response_headers,
    routed,
    slots,
)
from tests.unit.protocol.waiting_bench import END, Held

HOLDS = [BUFFERED, PARTIAL, DUPLEX, GRPC]


@pytest.mark.parametrize("modes", HOLDS)
def test_the_pick_is_delivered_once_a_server_is_free(modes: Modes) -> None:
    """A data plane that buffers is asked to wait. In full duplex the headers are not answered until then."""
    held = Held(ttl_seconds=3600.0, longest_delay_s=3600.0)
    stream, answered = held.waits(modes)
    assert answered == (() if modes.request_body.echoed else (Delay(3600.0),))
    held.gate.pump(now=2.0)
    assert held.later == []
    at = min(600.0, held.gate.due_at + 500.0)
    held.gate.pump(now=at)
    check_stream(stream)
    first = [Slot.REQUEST_HEADERS] if modes.request_body.echoed else []
    assert slots(held.later) == [*first, Slot.REQUEST_BODY]
    assert echoed(held.later) == (BODY if modes.request_body.echoed else b"")
    assert len(routed(held.later)) == 1
    pick = held.bench.seen.picks[-1]
    assert pick.decision.waited_s == pytest.approx(at - 1.0)
    stream.close(now=at)
    assert pick.over


def test_with_full_duplex_trailers_come_after_the_body() -> None:
    held = Held(ttl_seconds=900.0)
    stream = held.stream()
    stream.receive(head(DUPLEX), now=1.0)
    stream.receive(request_body(BODY, end_of_stream=False), now=1.0)
    assert stream.receive(request_trailers(), now=1.0) == ()
    held.gate.pump(now=600.0)
    assert slots(held.later) == [Slot.REQUEST_HEADERS, Slot.REQUEST_BODY, Slot.REQUEST_TRAILERS]


@pytest.mark.parametrize(
    ("modes", "delay_s", "prompt"),
    [(STREAMED, 10.0, True), (NONE, 10.0, True), (BUFFERED, 0.0, True), (DUPLEX, 10.0, False)],
    ids=["streamed", "none", "the data plane gives no time", "no prompt"],
)
def test_a_request_goes_at_once_if_it_cannot_wait(modes: Modes, delay_s: float, *, prompt: bool) -> None:
    held = Held(longest_delay_s=delay_s)
    stream = held.stream()
    answered = [*stream.receive(head(modes, end=not prompt), now=1.0)]
    if prompt and modes is not NONE:
        answered += stream.receive(END, now=1.0)
    assert len(routed(answered)) == 1


@pytest.mark.parametrize("modes", HOLDS)
def test_a_request_that_waited_too_long_is_refused_with_the_reason(modes: Modes) -> None:
    held = Held(ttl_seconds=5.0)
    stream, _ = held.waits(modes)
    held.gate.pump(now=6.5)
    refusal = refused(held.later)
    assert refusal.status == 429
    assert dict(refusal.headers)["x-llm-d-request-dropped-reason"] == refusal.reason == "flow_ttl"
    assert int(dict(refusal.headers)["retry-after"]) >= 1
    check_stream(stream)
    stream.close(now=7.0)


def test_a_buffered_request_is_refused_before_the_data_plane_times_out() -> None:
    held = Held(longest_delay_s=10.0, ttl_seconds=3000.0)
    held.waits(BUFFERED)
    held.gate.pump(now=10.5)
    assert isinstance(held.later[0], Refuse)


def test_a_request_of_a_gateway_with_a_fixed_time_out_is_refused_in_time() -> None:
    held = Held(longest_delay_s=0.0, given_delay_s=10.0, ttl_seconds=3000.0)
    _, answered = held.waits(BUFFERED)
    assert answered == ()
    held.gate.pump(now=9.5)
    assert held.later == []
    held.gate.pump(now=10.1)
    assert isinstance(held.later[0], Refuse)


@pytest.mark.parametrize("how", ["closed", "answered"])
def test_a_client_that_leaves_frees_its_place(how: str) -> None:
    held = Held()
    stream, _ = held.waits(BUFFERED)
    in_flight = held.bench.in_flight()
    if how == "closed":
        stream.close(now=2.0)
    else:  # the data plane answered the request itself
        stream.receive(response_headers(OK), now=2.0)
    check_stream(stream)
    assert held.gate.waiting == 0
    held.free()
    assert held.later == []
    assert held.bench.in_flight() == in_flight


def test_more_of_the_body_while_a_request_waits_is_a_protocol_error() -> None:
    held = Held()
    stream, _ = held.waits(DUPLEX)
    with pytest.raises(StreamProtocolError):
        stream.receive(request_body(b"x"), now=2.0)


def test_the_headers_give_tenant_and_priority() -> None:
    held = Held(objectives={"person": 7}, ttl_seconds=900.0)
    held.waits(DUPLEX, ("x-gateway-inference-objective", "person"), ("x-llm-d-inference-fairness-id", "team"))
    [status] = held.gate.status(now=1.0)
    assert dict(status.requests) == {7: 1}
    assert [(of.priority, of.tenant, of.requests) for of in status.tenants] == [(7, "team", 1)]
    held.gate.pump(now=600.0)
    assert held.bench.seen.picks[-1].decision.priority == 7
    assert list(held.gate.status(now=600.0)[0].let_go_tokens) == ["team"]


PERSON = ("x-llm-d-inference-objective", "person")
BY_ALL: dict[str, Any] = {
    "objectives": {"person": 7},
    "models": {"m": -3},
}


def priority_of(*headers: tuple[str, str], cluster: Mapping[str, int], flow: Mapping[str, Any]) -> int:
    held = Held(**flow)
    held.gate.set_objectives(cluster)
    stream = held.stream()
    stream.receive(head(DUPLEX, *headers), now=1.0)
    stream.receive(END, now=1.0)
    [status] = held.gate.status(now=1.0)
    [priority] = status.requests
    return priority


def test_the_cluster_then_the_policy_then_the_model_decide_the_priority() -> None:
    assert priority_of(PERSON, cluster={"person": 9}, flow=BY_ALL) == 9
    assert priority_of(PERSON, cluster={"other": 9}, flow=BY_ALL) == 7
    assert priority_of(cluster={"person": 9}, flow=BY_ALL) == -3
    unknown = ("x-llm-d-inference-objective", "999")
    assert priority_of(unknown, cluster={}, flow=BY_ALL) == -3
    assert priority_of(cluster={}, flow={}) == 0


def test_unknown_objectives_are_counted() -> None:
    held = Held()
    held.gate.set_objectives({"known": 1})
    for name in ("known", "typo", "typo"):
        stream = held.stream()
        stream.receive(head(DUPLEX, ("x-llm-d-inference-objective", name)), now=1.0)
        stream.receive(END, now=1.0)
    [status] = held.gate.status(now=1.0)
    assert status.unknown_objectives == 2
    assert status.requests == {1: 1, 0: 2}


def test_a_waiting_request_keeps_its_priority_whatever_changes() -> None:
    held = Held(objectives={"person": 7}, ttl_seconds=900.0)
    held.gate.set_objectives({"person": 10})
    held.waits(DUPLEX, PERSON)
    held.gate.set_objectives({})
    policy = held.bench.picker.policy
    flow = replace(policy.spec.flow, order="Shortest", deadline_seconds=800.0, objectives={"person": -3})
    held.bench.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=flow)))
    held.gate.pump(now=2.0)
    assert dict(held.gate.status(now=2.0)[0].requests) == {10: 1}
    held.gate.pump(now=600.0)
    assert [pick.decision.priority for pick in held.bench.seen.picks[-1:]] == [10]
    assert len(routed(held.later)) == 1


def test_claims_that_clients_may_not_make_are_not_read() -> None:
    flow = {**BY_ALL, "claims": ()}
    assert priority_of(PERSON, cluster={"person": 9}, flow=flow) == -3
    held = Held(claims=())
    held.waits(DUPLEX, ("x-llm-d-slo-ttft-ms", "1500"), ("x-llm-d-inference-fairness-id", "team"))
    assert [tenant for _, tenant, _ in held.tenants()] == [""]


def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once() -> None:
    held = Held()
    stream = held.stream()
    stream.receive(head(BUFFERED, ("x-llm-d-slo-ttft-ms", "1500")), now=1.0)
    assert refused([*stream.receive(END, now=1.0)]).reason == "flow_deadline"
