"""Requests that the picker has no time to read. Usual requests are answered at their headers and let go.
All other requests are handled as always.
"""

from __future__ import annotations

import random

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.config.policy import DEFAULT_POLICY
from epp.extproc.asking import request_names
from epp.extproc.codec import decode, encode
from epp.extproc.conversation import Conversation
from epp.extproc.header_names import DESTINATION, RESPONSE_NAMES
from epp.extproc.http_events import Answer
from epp.extproc.live_streams import LiveStreams
from epp.extproc.stream import HttpStream
from epp.extproc.stream_settings import StreamContext, StreamSettings
from epp.extproc.unread import Unread
from epp.http2.grpc_messages import INVALID_ARGUMENT, OK
from epp.picker.picker import Picker
from epp.request.blocked import BlockedPaths
from epp.types import Address, Endpoint, EndpointName
from tests.harness.seen import Seen
from tests.unit.extproc.callers import NotingCaller

POLICY = DEFAULT_POLICY
NAMES = request_names(POLICY.spec)
SETTINGS = StreamSettings(blocked=BlockedPaths(("/metrics",)), max_body_bytes=10_000)
USUAL = {":path": "/v1/completions", "x-request-id": "r1", "content-length": "4000"}


def picker_of_servers(*models: str) -> Picker:
    picker = Picker(POLICY, rng=random.Random(1))
    listed = [
        Endpoint(EndpointName(f"e{n}"), Address(f"10.0.0.{n + 1}", 80), model=model)
        for n, model in enumerate(models)
    ]
    picker.set_endpoints(listed, now=0.0)
    return picker


def headers_message(
    *, mode: int = 2, ends: bool = False, **changed: str | None
) -> ext_proc.ProcessingRequest:
    made = ext_proc.ProcessingRequest()
    names = {"path": ":path", "request_id": "x-request-id", "size": "content-length"}
    wanted: dict[str, str | None] = {**USUAL, **{names[name]: value for name, value in changed.items()}}
    for name, value in wanted.items():
        if value is not None:
            made.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    made.request_headers.end_of_stream = ends
    if mode >= 0:
        made.protocol_config.request_body_mode = mode
    return made


def answer(data: bytes, picker: Picker, *, settings: StreamSettings = SETTINGS) -> Answer | None:
    unread = Unread(picker, timer=lambda: 0.0)
    if not unread.answers(settings):
        return None
    event = decode(data, names=NAMES, response_names=RESPONSE_NAMES)
    return unread.answer(event, settings=settings, now=1.0)


def called(data: bytes, picker: Picker) -> tuple[NotingCaller, LiveStreams]:
    """Begin a call in an overload."""
    streams = LiveStreams(picker, settings=SETTINGS, clock=lambda: 1.0)
    for late in range(20):
        streams.overload.skips(waited_s=1.0, now=0.8 + 0.01 * late)
    call = NotingCaller(waited_s=1.0)
    Conversation(streams, call).message(data, now=1.0)
    return call, streams


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_the_usual_request_gets_the_answer_of_a_stream_and_holds_nothing(mode: int) -> None:
    picker, data = picker_of_servers("m"), headers_message(mode=mode).SerializeToString()
    seen = Seen.of(picker)
    found = answer(data, picker)
    stream = HttpStream(
        StreamContext(picker_of_servers("m"), settings=SETTINGS, new_request_id=str, timer=lambda: 0.0),
        unread=True,
    )
    event = decode(data, names=NAMES, response_names=RESPONSE_NAMES)
    assert [found] == list(stream.receive(event, now=1.0))
    decision = seen.picks[0].decision
    assert (decision.request_id, decision.unread, decision.outcome) == ("r1", "overload", "detached")
    assert seen.over == seen.picks
    assert all(state.in_flight == 0 for state in picker.fleet.states())


def test_unread_requests_are_counted_and_spread_over_the_servers() -> None:
    picker = picker_of_servers("m", "m", "m")
    for _ in range(300):
        answer(headers_message().SerializeToString(), picker)
    sent = [state.picks_since_scrape for state in picker.fleet.states()]
    assert sum(sent) == 300
    assert min(sent) > 50


def with_subset() -> ext_proc.ProcessingRequest:
    made = headers_message()
    made.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[
        f"{DESTINATION}-subset"
    ].string_value = "10.0.0.1:80"
    return made


@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(headers_message(path="/metrics"), id="blocked"),
        pytest.param(headers_message(request_id=None), id="without an id"),
        pytest.param(headers_message(size="20000"), id="too large"),
        pytest.param(headers_message(ends=True), id="without a body"),
        pytest.param(headers_message(mode=4), id="echoed"),
        pytest.param(headers_message(mode=0), id="body not sent"),
        pytest.param(headers_message(mode=-1), id="mode not told"),
        pytest.param(with_subset(), id="subset"),
    ],
)
def test_every_other_request_gets_a_stream(unusual: ext_proc.ProcessingRequest) -> None:
    picker = picker_of_servers("m")
    seen = Seen.of(picker)
    assert answer(unusual.SerializeToString(), picker) is None
    assert not seen.picks


def test_every_request_gets_a_stream_if_models_differ_or_there_is_no_endpoint() -> None:
    for picker in (picker_of_servers("m", "n"), picker_of_servers()):
        assert answer(headers_message().SerializeToString(), picker) is None


def test_an_unread_request_ends_its_call_with_the_answer() -> None:
    data = headers_message().SerializeToString()
    call, streams = called(data, picker_of_servers("m"))
    found = answer(data, picker_of_servers("m"))
    assert found is not None
    assert (call.sent, call.ended, streams.live) == ([encode(found)], [(OK, "")], {})


@pytest.mark.parametrize(("data", "reason"), [(b"\xff\xff", "undecodable"), (b"", "empty_message")])
def test_bytes_that_are_not_a_message_end_the_call_with_an_error(data: bytes, reason: str) -> None:
    picker = picker_of_servers("m")
    seen = Seen.of(picker)
    call, streams = called(data, picker)
    assert (call.sent, call.ended, streams.live) == ([], [(INVALID_ARGUMENT, reason)], {})
    assert not seen.picks
