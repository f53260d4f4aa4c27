"""The streams of one server: the drain, and flow control that ends."""

from __future__ import annotations

from msgspec.structs import replace

from epp.config.flow import Flow
from epp.transport.http2.grpc_messages import OK
from tests.unit.protocol.calls_bench import Calls, answer, body, head


def test_next_call_after_the_end_of_flow_control_has_the_gate_pumped_soon() -> None:
    calls = Calls(mode="Hold")
    calls.ask()
    _, waits = calls.ask()
    policy, pumps = calls.picker.policy, calls.pumps
    calls.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=Flow())), now=1.0)
    calls.ask()
    assert calls.pumps == pumps + 1
    calls.gate.pump(now=1.0)
    assert (calls.gate.waiting, len(waits.sent)) == (0, 3), "the headers, the delay and the pick"


def test_a_drain_ends_the_calls_that_were_answered_and_keeps_the_others() -> None:
    calls = Calls()
    _, answered = calls.ask(head(), body(), answer())
    _, picked = calls.ask()
    assert (answered.ended, picked.ended) == ([], [])
    assert calls.streams.drain() == frozenset()
    assert (answered.ended, picked.ended, len(calls.streams.live)) == ([(OK, "")], [], 1)
    _, later = calls.ask(head(), body(), answer())
    assert (later.ended, len(calls.streams.live)) == ([(OK, "")], 1)
    calls.streams.check_integrity()


def test_a_drain_names_the_streams_whose_requests_waited() -> None:
    calls = Calls(mode="Hold")
    calls.ask()
    calls.ask()
    _, waits = calls.streams.live
    assert calls.streams.drain() == {waits}
    calls.gate.pump(now=1.0)
    assert calls.gate.waiting == 0
