"""Each picker knows which requests wait at the others: which reports it gets, and what happens when
reports are lost or old.
"""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from msgspec.structs import replace

from epp.base.errors import FlowRefusedError
from epp.base.types import ApiKind, InferenceRequest
from epp.config.flow import Flow, WaitingSettings
from epp.config.policy import DEFAULT_POLICY
from epp.config.routing import Cost
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.flow.elsewhere import Row
from epp.picker.gate import FlowClaim, Gate
from epp.protocol.asking import read_head
from epp.request.parse import parse_request
from epp.sources.sharing.batches import decode_batch
from epp.sources.sharing.speaker import Speaker
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import TIMEOUT_S, Replica, meet

SLOW = Cost(prefill_tokens_per_second=1.0)


def replica(number: int, **flow: object) -> Replica:
    spec = replace(
        DEFAULT_POLICY.spec,
        cost=SLOW,
        flow=Flow(mode="Hold", objectives={"high": 5}, **flow),  # type: ignore[arg-type]  # any field of it
    )
    return Replica(number, policy=replace(DEFAULT_POLICY, spec=spec))


def two_busy(**flow: object) -> tuple[Replica, Replica]:
    """Return two pickers whose servers are busy for long."""
    one, other = replica(1, **flow), replica(2, **flow)
    meet([one, other], now=0.0)
    for name in "ab":
        one.pick(text(name), now=3.0)
    other.receive(one.send(now=3.0), now=3.0)
    return one, other


def offer(at: Replica, name: str, *, tenant: str = "t", objective: str = "", now: float) -> object:
    inference = InferenceRequest(kind=ApiKind.CHAT, model="m", prompt=text(name), stream=True)
    return at.gate.offer(
        Question(request_id=name, inference=inference),
        FlowClaim(objective, tenant),
        lambda _fate, _now: None,
        size_bytes=100,
        longest_s=3600.0,
        now=now,
    )


def test_requests_that_wait_at_one_picker_count_in_the_bounds_of_others() -> None:
    one, other = two_busy(per_tenant=WaitingSettings(max_requests=3))
    for n in range(3):
        offer(one, f"p{n}", now=3.1)
    other.receive(one.send(now=3.2), now=3.2)
    with pytest.raises(FlowRefusedError) as refused:
        offer(other, "q", now=3.3)
    assert refused.value.reason == "flow_full"
    assert not isinstance(offer(other, "q", tenant="another", now=3.3), Pick)


@pytest.mark.parametrize(
    ("header", "body"),
    [("x" * 300, {}), ("é" * 5000, {}), ("t", {"priority": 9999}), ("t", {"priority": -9999}), ("", {})],
)
def test_other_pickers_can_read_any_tenant_and_priority_that_client_names(
    header: str, body: dict[str, int]
) -> None:
    """A batch with a name or a number that is out of bounds would be refused as a whole, with all other
    events in it.
    """
    claims = ("Tenant", "BodyPriority")
    one, other = two_busy(per_tenant=WaitingSettings(max_requests=1), claims=claims)
    flow = one.picker.policy.spec.flow
    named = [(":path", "/v1/chat/completions"), (flow.tenant_header, header)]
    claim = read_head(named, one.picker.policy.spec, flow=one.picker.flow_read).claim
    sent = {"model": "m", "messages": [{"role": "user", "content": text("p").decode()}], **body}
    inference = parse_request("/v1/chat/completions", msgspec.json.encode(sent))

    def ask(at: Replica, now: float) -> object:
        return at.gate.offer(
            Question(request_id="p", inference=inference),
            claim,
            lambda _fate, _now: None,
            size_bytes=100,
            longest_s=3600.0,
            now=now,
        )

    assert not isinstance(ask(one, 3.1), Pick)
    other.receive(one.send(now=3.2), now=3.2)
    with pytest.raises(FlowRefusedError):
        ask(other, 3.3)


def test_the_reported_number_of_tokens_is_bounded_by_what_others_can_read() -> None:
    class Much:
        def reports(self, *, anew: bool = False) -> list[tuple[str, Row]]:
            return [("m", Row(0, "t", 2**40, 0, 0, 0))]

    speaker = Speaker(speaker=b"me", limit_bytes=2**20, gate=cast("Gate", Much()))
    speaker.gather_flow()
    assert decode_batch(speaker.batch(now=0.0)).flow[0][3] == 2**31


def test_the_waiting_requests_of_a_silent_picker_do_not_count() -> None:
    one, other = two_busy(in_all=WaitingSettings(max_requests=1))
    offer(one, "p", now=3.1)
    other.receive(one.send(now=3.2), now=3.2)
    with pytest.raises(FlowRefusedError):
        offer(other, "q", now=3.3)
    other.exchange.listener.expire(now=3.3 + TIMEOUT_S)
    offer(other, "q", now=3.4 + TIMEOUT_S)


def test_a_picker_that_joins_later_gets_all_queues() -> None:
    one, _ = two_busy(in_all=WaitingSettings(max_requests=1))
    offer(one, "p", now=3.1)
    one.send(now=3.2)
    late = replica(3, in_all=WaitingSettings(max_requests=1))
    late.pick(text("a"), now=3.3)
    late.pick(text("b"), now=3.3)
    late.receive(one.send(now=4.5), now=4.5)
    with pytest.raises(FlowRefusedError):
        offer(late, "q", now=4.6)


def test_a_waiting_request_that_left_is_reported() -> None:
    one, other = two_busy(in_all=WaitingSettings(max_requests=1))
    ticket = offer(one, "p", now=3.1)
    other.receive(one.send(now=3.2), now=3.2)
    one.gate.leave(ticket)  # type: ignore[arg-type]
    other.receive(one.send(now=3.3), now=3.3)
    offer(other, "q", now=3.4)
    assert other.gate.waiting == 1


def test_the_tokens_of_the_first_request_are_reported_even_if_none_waits() -> None:
    one, other = replica(1), replica(2)
    meet([one, other], now=0.0)
    assert isinstance(offer(one, "p", now=3.0), Pick)
    [(_, row)] = one.gate.reports()
    assert (row.tenant, row.requests) == ("t", 0)
    assert row.let_go_tokens > 0
