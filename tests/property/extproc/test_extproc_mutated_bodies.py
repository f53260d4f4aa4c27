"""Damaged bodies go through the whole state machine and a real picker. Each is routed or refused, and
nothing stays booked.
"""

from __future__ import annotations

import json
import random

import pytest

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.picker.picker import Picker
from epp.picker.prefix_index.integrity import check_integrity
from epp.protocol.http_events import BodyMode, Modes, RequestBody, RequestHeaders, ResponseHeaders
from epp.protocol.stream import HttpStream
from epp.protocol.stream_settings import StreamContext, StreamSettings
from tests.harness.seen import Seen

MUTANTS = 10_000
VALID: list[tuple[str, dict[str, object]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello " * 80}], "tools": [{"type": "function"}]},
    ),
    ("/v1/completions", {"prompt": ["one " * 100, "two"], "cache_salt": "s", "stream": True}),
    ("/v1/completions", {"prompt": [1, 2, 3] * 40, "max_tokens": 4}),
    ("/v1/embeddings", {"input": "text"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "instructions": "i"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}]}),
]
MODES = [
    Modes(BodyMode.BUFFERED),
    Modes(BodyMode.BUFFERED_PARTIAL),
    Modes(BodyMode.STREAMED),
    Modes(BodyMode.STREAMED, early_body=True),
    Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED),
]
ODD = [b"{", b"}", b"[", b'"', b"\\ud800", b"\xff", b"\0", b"null", b"-1", b"1e999", b"9" * 400, b"[" * 1500]


def damaged(body: bytes, rng: random.Random) -> bytes:
    """Damage a body one to three times: flip a bit, or cut out, repeat or replace a piece."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(body))
        end = min(len(body), at + rng.randrange(1, 30))
        middle = rng.choice(
            [bytes([body[at] ^ 1 << rng.randrange(8)]), b"", body[at:end] * 2, rng.choice(ODD)]
        )
        body = body[:at] + middle + body[end:] or b"{"
    return body


@pytest.mark.slow
def test_ten_thousand_damaged_bodies_are_routed_or_refused_and_leave_no_booking() -> None:
    rng = random.Random(3)
    picker = Picker(DEFAULT_POLICY, rng=rng)
    picker.set_endpoints(
        [Endpoint(name=EndpointName(n), address=Address(f"10.0.0.{n}", 80)) for n in "123"], now=0.0
    )
    reasons: dict[str, int] = {}
    for number in range(MUTANTS):
        now = number * 0.01
        path, document = VALID[number % len(VALID)]
        body = damaged(json.dumps({"model": "m", **document}).encode(), rng)
        seen = Seen.of(picker)
        stream = HttpStream(
            StreamContext(picker, settings=StreamSettings(), new_request_id=lambda: "made", timer=lambda: 0.0)
        )
        modes = MODES[number // len(VALID) % len(MODES)]
        stream.receive(RequestHeaders(((":path", path),), modes=modes), now=now)
        stream.receive(RequestBody(body, end_of_stream=True), now=now)
        stream.check_integrity()
        assert len(seen.picks) + len(seen.refusals) == 1
        if seen.picks and number % 3:
            status = "200" if number % 2 else "500"
            stream.receive(ResponseHeaders(((":status", status),), end_of_stream=number % 5 == 0), now=now)
        stream.close(now=now)
        picker.unsubscribe(seen.on_event)
        picker.housekeep(now=now)
        stream.check_integrity()
        for _, error in seen.refusals:
            assert error.status == 400
        label = seen.refusals[0][1].reason if seen.refusals else "routed"
        reasons[label] = reasons.get(label, 0) + 1
        if number % 100 == 0:
            check_integrity(picker.table)
    states = list(picker.fleet.states())
    picker.fleet.check_integrity()
    check_integrity(picker.table)
    assert [s.in_flight for s in states] == [0, 0, 0]
    assert [len(s.backlog.bookings) for s in states] == [0, 0, 0]
    # Some bodies are refused, and some are accepted.
    assert reasons["routed"] > MUTANTS // 10
    assert {"bad_json", "bad_field", "no_model"} <= set(reasons)
