"""The connection reports the same events however reads cut the bytes, and wherever reading stops."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.transport.http2.frames import Limits, Setting, frame
from epp.transport.http2.frames import settings as settings_frame
from epp.transport.http2.messages import Http2Event, Message
from tests.harness.http2_frames import (
    NO_TABLE,
    CallerSide,
    block,
    continuation,
    data,
    grpc,
    headers,
    hello,
    ping,
    reset,
    window_update,
)

numbers = st.sampled_from([1, 3, 5, 7])
messages = st.lists(st.binary(max_size=40), max_size=3).map(lambda parts: b"".join(map(grpc, parts)))


@st.composite
def header_frames(draw: st.DrawFn) -> bytes:
    number, ends = draw(numbers), draw(st.booleans())
    fields = draw(st.sampled_from([[], [("content-type", "text/html")], [("te", "x")]]))
    whole = draw(st.sampled_from([b"", NO_TABLE])) + block(replace=fields)
    cut = draw(st.integers(0, len(whole)))
    if draw(st.booleans()):
        return headers(number, whole, ends=ends)
    return headers(number, whole[:cut], ends=ends, whole=False) + continuation(
        number, whole[cut:], whole=True
    )


@st.composite
def data_frames(draw: st.DrawFn) -> bytes:
    payload = draw(messages)
    cut = draw(st.integers(0, len(payload)))
    padding = draw(st.none() | st.integers(0, 5))
    number = draw(numbers)
    return data(number, payload[:cut], padding=padding) + data(
        number, payload[cut:], ends=draw(st.booleans())
    )


frames = st.one_of(
    header_frames(),
    header_frames(),
    data_frames(),
    data_frames(),
    numbers.map(reset),
    st.builds(window_update, st.sampled_from([0, 1, 3, 99]), st.integers(0, 2**31 - 1)),
    st.just(ping()),
    st.integers(0, 10**6).map(lambda size: settings_frame([(Setting.INITIAL_WINDOW_SIZE, size)])),
    st.builds(
        frame,
        st.integers(0, 12),
        st.binary(max_size=20),
        flags=st.integers(0, 255),
        stream_id=st.integers(0, 9),
    ),
)
LIMITS = Limits(max_message_bytes=30, max_streams=3)


def events_of(wire: bytes, cuts: list[int], limits: list[int]) -> tuple[list[Http2Event], str]:
    side = CallerSide(limits=LIMITS)
    edges = [0, *sorted(cuts), len(wire)]
    limit = iter(limits * (10 * len(wire) + 10))
    events: list[Http2Event] = []
    for start, end in itertools.pairwise(edges):
        events += side.feed(wire[start:end], limit=next(limit))
        while side.connection.pending:
            events += side.feed(limit=next(limit))
    return events, side.connection.over


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(frames, max_size=12), st.data())
def test_every_split_of_the_bytes_gives_the_same_events(script: list[bytes], draw: st.DataObject) -> None:
    wire = hello() + b"".join(script)
    cuts = draw.draw(st.lists(st.integers(0, len(wire)), max_size=20))
    limits = draw.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = events_of(wire, [], [2**31])
    assert events_of(wire, cuts, limits) == whole
    assert events_of(wire, list(range(len(wire))), [1]) == whole


def test_messages_in_frames_of_any_size_are_read() -> None:
    """A frame holds a part of a message, its end, or its end and the beginning of the next message."""
    messages = [random.Random(size).randbytes(size) for size in (30, 0, 29, 1, 13, 30)]
    body = b"".join(map(grpc, messages))
    for size in range(1, 40):
        parts = [data(1, body[at : at + size]) for at in range(0, len(body), size)]
        events, over = events_of(hello() + headers(1) + b"".join(parts), [], [2**31])
        assert [event.data for event in events if isinstance(event, Message)] == messages
        assert not over
