"""Whatever a data plane sends, the stream answers or gives a reason, and leaves nothing booked."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.config.policy import PolicySpec, Sampling
from epp.picker.picker import Picker
from epp.protocol.codec import encode
from epp.protocol.http_events import (
    BodyMode,
    BodyRoom,
    HttpEvent,
    Modes,
    Refuse,
    StreamProtocolError,
)
from epp.protocol.settings import StreamSettings
from tests.harness.seen import Seen
from tests.invariants.protocol import check_stream
from tests.unit.picker.picker_questions import a_picker, endpoints
from tests.unit.protocol.stream_bench import (
    a_stream,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)


def sampling_picker() -> Picker:
    spec = PolicySpec(sampling=Sampling(share=0.5), debug_header="x-why")
    return a_picker(spec, on=endpoints("abc"), seed=1)


MODES = st.builds(
    Modes,
    request_body=st.sampled_from(BodyMode),
    response_body=st.sampled_from(BodyMode),
)
ANY_MODES = st.none() | MODES
NAMES = st.sampled_from(
    [
        ":path",
        ":status",
        "Content-Length",
        "content-encoding",
        "x-request-id",
        "X-WHY",
        "x-session-id",
        "x-gateway-destination-endpoint",
        "test-epp-endpoint-selection",
        "content-type",
        "other",
    ]
)
VALUES = st.sampled_from(
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "200",
        "500",
        "7",
        "-1",
        "9" * 30,
        "10.0.0.1:8000",
        "gzip",
        "text/event-stream",
        "",
        "ÿ\x00",
        "10.0.0.2",
        "²",
    ]
)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=6).map(tuple)
GOOD_BODY = json.dumps({"model": "m", "prompt": "p" * 700, "stream": True}).encode()
DATA = st.sampled_from([b"", GOOD_BODY, GOOD_BODY[:300], GOOD_BODY[300:], b"{}", b"\xff", b"x" * 70_000])
EVENTS: st.SearchStrategy[HttpEvent] = st.one_of(
    st.builds(
        request_headers,
        HEADERS,
        end_of_stream=st.booleans(),
        subset=st.none() | st.lists(VALUES, max_size=3).map(tuple),
        modes=ANY_MODES,
    ),
    st.builds(request_body, DATA, end_of_stream=st.booleans(), modes=ANY_MODES),
    st.builds(request_trailers),
    st.builds(
        response_headers,
        HEADERS | st.just(((":status", "200"), ("content-type", "text/event-stream"))),
        end_of_stream=st.booleans(),
        served=VALUES,
        modes=ANY_MODES,
    ),
    st.builds(response_body, DATA, end_of_stream=st.booleans(), modes=ANY_MODES),
    st.builds(response_trailers),
)
SETTINGS = st.builds(
    StreamSettings,
    room=st.builds(BodyRoom, st.sampled_from([200, 1_000, 100_000])),
    max_body_bytes=st.sampled_from([500, 100_000]),
    hold_streams=st.booleans(),
    conformance_headers=st.booleans(),
    mode_override=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(EVENTS, max_size=10),
    given_settings=SETTINGS,
    end=st.sampled_from(["close", "broken", "detach"]),
)
def test_no_order_of_events_breaks_the_stream_or_leaves_a_booking(
    events: list[HttpEvent], given_settings: StreamSettings, end: str
) -> None:
    picker = sampling_picker()
    seen = Seen.of(picker)
    stream = a_stream(picker, given_settings)
    for i, event in enumerate(events):
        try:
            actions = stream.receive(event, now=float(i))
        except StreamProtocolError:
            break
        for action in actions:
            assert encode(action)
        assert sum(isinstance(a, Refuse) for a in actions) <= 1
        check_stream(stream)
    if end == "detach" and stream.can_detach:
        stream.close(now=50.0, goes_on=True)
    stream.close(now=50.0, broken=end == "broken")
    check_stream(stream)
    assert len(seen.picks) <= 1
    assert all(error.status in (400, 413, 429, 503) for _, error in seen.refusals)
    assert seen.over == seen.picks
    assert all(p.over for p in seen.picks)
    detached = any(p.decision.outcome == "detached" for p in seen.picks)
    assert detached or all(s.in_flight == 0 for s in picker.fleet.states())
    assert given_settings.room.held_bytes == 0
