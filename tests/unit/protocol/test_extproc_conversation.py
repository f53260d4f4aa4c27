"""Calls of one server: when the gate is asked and pumped, the work that a call leaves, and the drain."""

import dataclasses

from msgspec.structs import replace

from epp.config.flow import Flow
from epp.protocol.conversation import Conversation
from epp.transport.http2.messages import OK
from tests.invariants.protocol import check_streams
from tests.unit.protocol.calls_bench import Calls, NotingCaller, answer, body, head


def test_no_call_asks_the_gate_if_flow_control_is_off() -> None:
    calls, others = Calls(), Calls(mode="Hold")
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


def test_a_call_that_opened_before_a_new_policy_is_read_by_it() -> None:
    calls = Calls()
    call = Conversation(calls.streams, NotingCaller())
    policy = calls.picker.policy
    calls.picker.set_policy(replace(policy, spec=replace(policy.spec, session_header="x-chat")))
    call.message(head(), now=1.0)
    assert "x-chat" in calls.streams.names, "else the head has no session"


def test_picks_leave_work_for_later_once_until_it_is_done() -> None:
    calls, answered = Calls(), list[int]()
    call, caller = calls.ask(head())
    calls.streams.on_pick = lambda: answered.append(len(caller.sent))
    calls.ask()  # leaves no work
    calls.picker.fleet.failures.convict(next(iter(calls.picker.fleet.states())), now=1.0)
    call.message(body(), now=1.0)
    call.message(answer(), now=1.0)
    assert answered == [2], "the pick is answered before the work"
    calls.ask()
    calls.streams.tidy()
    calls.ask()
    assert len(answered) == 2, "one portion of work for all picks until it is done"


def test_gate_is_pumped_soon_when_a_request_waits_and_when_another_ends() -> None:
    calls = Calls(mode="Hold")
    first, _ = calls.ask()
    assert calls.pumps == 0
    calls.ask()
    assert (calls.gate.waiting, calls.pumps) == (1, 1)
    first.half_closed(now=2.0)
    assert calls.pumps == 2


def test_next_call_after_the_end_of_flow_control_has_the_gate_pumped_soon() -> None:
    calls = Calls(mode="Hold")
    calls.ask()
    _, waits = calls.ask()
    policy, pumps = calls.picker.policy, calls.pumps
    calls.picker.set_policy(replace(policy, spec=replace(policy.spec, flow=Flow())))
    calls.ask()
    assert calls.pumps == pumps + 1
    calls.gate.pump(now=1.0)
    assert (calls.gate.waiting, len(waits.sent)) == (0, 3), "the headers, the delay and the pick"


def test_a_drain_ends_the_calls_that_were_answered_and_keeps_the_others() -> None:
    calls = Calls()
    _, answered = calls.ask(head(), body(), answer())
    _, picked = calls.ask()
    assert (answered.ended, picked.ended) == ([], [])
    assert not calls.streams.drain()
    assert (answered.ended, picked.ended, len(calls.streams.live)) == ([(OK, "")], [], 1)
    _, later = calls.ask(head(), body(), answer())
    assert (later.ended, len(calls.streams.live)) == ([(OK, "")], 1)
    check_streams(calls.streams)


def test_a_drain_tells_whether_requests_waited() -> None:
    calls = Calls(mode="Hold")
    calls.ask()
    calls.ask()
    assert calls.streams.drain()
    calls.gate.pump(now=1.0)
    assert calls.gate.waiting == 0
