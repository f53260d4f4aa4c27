"""Calls of one server and flow control: when the gate is asked, and when it is pumped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from msgspec.structs import replace

from epp.config.flow import Flow
from epp.config.routing import Cost
from epp.extproc.conversation import Conversation
from epp.extproc.live_streams import LiveStreams
from epp.extproc.stream_settings import StreamSettings
from epp.http2.grpc_messages import OK
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from tests.unit.extproc.callers import NotingCaller
from tests.unit.extproc.stream_bench import BODY, HEADERS, Bench
from tests.unit.extproc.stream_bench import OK as OK_HEADERS


class Calls:
    """Calls of a picker whose servers take long for each prompt."""

    def __init__(self, **flow: Any) -> None:
        bench = Bench(flow=Flow(**flow), cost=Cost(prefill_tokens_per_second=1.0))
        bench.set_endpoints(bench.picker.endpoints()[0].address)
        self.picker: Picker = bench.picker
        self.gate = Gate(self.picker)
        settings = StreamSettings(longest_delay_s=30.0)
        self.streams = LiveStreams(self.picker, settings=settings, clock=lambda: 1.0, gate=self.gate)
        self.pumps = 0
        self.streams.on_room = self._pump_soon

    def _pump_soon(self) -> None:
        self.pumps += 1

    def ask(self, *messages: bytes) -> tuple[Conversation, NotingCaller]:
        caller = NotingCaller()
        call = Conversation(self.streams, caller)
        for data in messages or (head(), body()):
            call.message(data, now=1.0)
        return call, caller


def head() -> bytes:
    message = ext_proc.ProcessingRequest()
    fill(message.request_headers, HEADERS)
    message.protocol_config.request_body_mode = 2
    return bytes(message.SerializeToString())


def body() -> bytes:
    message = ext_proc.ProcessingRequest(request_body={"body": BODY, "end_of_stream": True})
    return bytes(message.SerializeToString())


def answer() -> bytes:
    message = ext_proc.ProcessingRequest()
    fill(message.response_headers, OK_HEADERS)
    return bytes(message.SerializeToString())


def fill(part: ext_proc.HttpHeaders, headers: Sequence[tuple[str, str]]) -> None:
    for name, value in headers:
        part.headers.headers.add(key=name, raw_value=value.encode())


def test_no_call_asks_the_gate_if_flow_control_is_off() -> None:
    calls, others = Calls(), Calls(mode="Hold", headroom_seconds=0.1)
    others.ask()
    others.ask()
    assert others.gate.waiting == 1
    calls.ask(head())[0].gone(now=1.0, broken=False)  # the first call reads the policy
    # In this gate a request waits. A call that asked the gate would have it pumped, or would wait there too.
    calls.streams.context = dataclasses.replace(calls.streams.context, gate=others.gate)
    call, caller = calls.ask(head(), body(), answer())
    call.half_closed(now=2.0)
    other, _ = calls.ask()
    other.gone(now=2.0, broken=False)
    assert (len(caller.sent), caller.ended, calls.streams.live) == (3, [(OK, "")], {})
    assert (calls.pumps, others.gate.waiting) == (0, 1)


def test_a_call_leaves_work_for_later_once_when_its_request_is_picked() -> None:
    calls = Calls()
    call, caller = calls.ask(head())
    assert caller.left_work == 0
    call.message(body(), now=1.0)
    assert caller.left_work == 1
    call.message(answer(), now=1.0)
    assert caller.left_work == 1


def test_the_gate_is_pumped_soon_when_a_request_waits_and_when_another_ends() -> None:
    calls = Calls(mode="Hold", headroom_seconds=0.1)
    first, _ = calls.ask()
    assert calls.pumps == 0
    calls.ask()
    assert (calls.gate.waiting, calls.pumps) == (1, 1)
    first.half_closed(now=2.0)
    assert calls.pumps == 2


def test_the_next_call_after_the_end_of_flow_control_has_the_gate_pumped_soon() -> None:
    calls = Calls(mode="Hold", headroom_seconds=0.1)
    calls.ask()
    _, waits = calls.ask()
    policy, pumps = calls.picker.policy, calls.pumps
    calls.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=Flow())), now=1.0)
    calls.ask()
    assert calls.pumps == pumps + 1
    calls.gate.pump(now=1.0)
    assert (calls.gate.waiting, len(waits.sent)) == (0, 3), "the headers, the delay and the pick"
