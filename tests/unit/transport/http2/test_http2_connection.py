"""The connection object as a client sees it: calls, messages, headers, flow control and ends."""

import pytest

from epp.transport.http2.frames import Code, HeaderReader, Kind, Limits
from epp.transport.http2.messages import Fault, Gone, HalfClosed, Message, Opened
from tests.harness.http2_frames import (
    NO_TABLE,
    PATH,
    CallerSide,
    block,
    bodies,
    continuation,
    data,
    grpc,
    headers,
    messages_in,
    reset,
    window_update,
)

SMALL = Limits(
    max_message_bytes=50_000, stream_window_bytes=1000, connection_window_bytes=100_000, backlog_bytes=500
)


def test_a_call_from_its_headers_to_its_trailers() -> None:
    side = CallerSide().opened()
    opened, message, half_closed = side.feed(headers(1), data(1, grpc(b"hello"), ends=True))
    assert isinstance(opened, Opened)
    assert opened.request.path == PATH
    assert message == Message(1, b"hello")
    assert half_closed == HalfClosed(1)
    side.connection.send(1, b"answer")
    side.connection.end(1)
    head, body, trailers = side.sent()
    assert side.fields(head) == {":status": "200", "content-type": "application/grpc"}
    assert (body.kind, body.payload, body.ends) == (Kind.DATA, grpc(b"answer"), False)
    assert side.fields(trailers) == {"grpc-status": "0"}
    assert trailers.ends
    assert not side.connection.streams


def test_a_call_that_ends_before_the_client_does_is_reset_without_an_error() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    side.connection.end(1, 3, "100 % wrong: é\n")
    trailers, stop = side.sent()
    assert side.fields(trailers)["grpc-message"] == "100 %25 wrong: %C3%A9%0A"
    assert (stop.kind, stop.code) == (Kind.RST_STREAM, Code.NO_ERROR)
    assert side.feed(data(1, grpc(b"late")), reset(1)) == [], "frames that were on their way are ignored"
    assert side.sent() == []


def test_half_a_window_of_received_bytes_opens_the_window_again() -> None:
    side = CallerSide(limits=SMALL).opened()
    side.feed(headers(1), data(1, grpc(b"x" * 5000)[:499]))
    assert side.sent() == []
    side.feed(data(1, b"x"))
    (update,) = side.sent()
    assert (update.kind, update.number, int.from_bytes(update.payload)) == (Kind.WINDOW_UPDATE, 1, 500)


def test_bytes_of_a_closed_stream_open_the_window_of_the_connection_again() -> None:
    side = CallerSide(limits=SMALL).opened()
    for number in range(1, 121, 2):
        side.feed(headers(number), data(number, grpc(b"x" * 5000)[:900]), reset(number))
    opened = sum(int.from_bytes(f.payload) for f in side.sent() if f.number == 0)
    assert opened == 50_400, "the window is opened in steps of half its size"


@pytest.mark.parametrize("where", ["stream", "connection"])
def test_a_client_that_overruns_a_window_is_stopped(where: str) -> None:
    limits = Limits(max_message_bytes=10**6, stream_window_bytes=1000, connection_window_bytes=65_535)
    side = CallerSide(limits=limits).opened()
    if where == "stream":
        events = side.feed(headers(1), data(1, bytes(1001)))
        assert events[1:] == [Gone(1), Fault("window_overrun")]
        (stop,) = side.sent()
        assert (stop.kind, stop.code) == (Kind.RST_STREAM, Code.FLOW_CONTROL_ERROR)
    else:
        assert side.feed(headers(1), data(1, bytes(65_536)))[-1] == Fault("window_overrun")
        assert side.sent()[-1].code == Code.FLOW_CONTROL_ERROR


def test_the_window_of_the_connection_is_shared_out_in_turn() -> None:
    side = CallerSide().opened(window=10**6)
    side.feed(headers(1), headers(3))
    side.connection.send(1, b"x" * 65_000)
    side.connection.send(1, b"x" * 2000)
    side.connection.send(3, b"y" * 100)
    assert bodies(side.sent(), 3) == b""
    side.feed(window_update(0, 5000))
    frames = side.sent()
    assert bodies(frames, 3) == grpc(b"y" * 100)


def test_an_answer_that_waits_holds_back_our_window() -> None:
    side = CallerSide(limits=SMALL).opened(window=0)
    side.feed(headers(1))
    side.connection.send(1, b"x" * 600)
    side.sent()
    side.feed(data(1, grpc(b"y" * 5000)[:600]))
    assert side.sent() == []
    side.feed(window_update(1, 300))
    updates = [f for f in side.sent() if f.kind == Kind.WINDOW_UPDATE]
    assert [int.from_bytes(f.payload) for f in updates] == [600]


def echo(data: bytes, at: int, end: int) -> bytes | None:
    """Return the frame as it came, if its messages are whole and none of them asks for a decision."""
    part = data[at:end]
    return None if messages_in(part) is None or b"?" in part else part


def answering(*, window: int = 65_535) -> CallerSide:
    """Return a call whose answer has begun."""
    side = CallerSide().opened(window=window)
    side.feed(headers(1))
    side.connection.send(1, b"first")
    side.sent()
    return side


def test_a_reply_that_fits_no_window_is_left_to_the_owner() -> None:
    side = answering(window=30)
    side.connection.reply(1, echo)
    assert side.feed(data(1, grpc(b"x" * 16))) == [Message(1, b"x" * 16)]
    side.connection.reply(1, echo)
    assert side.feed(data(1, grpc(b"x" * 15))) == [], "twenty bytes are left, and the frame takes twenty"
    side.connection.send(1, b"later")
    side.connection.reply(1, echo)
    side.feed(window_update(1, 3))
    assert side.feed(data(1, grpc(b"y"))) == [Message(1, b"y")], (
        "an answer waits, and replies would overtake it"
    )
    assert bodies(side.sent(), 1) == grpc(b"x" * 15) + grpc(b"later")[:3]


def test_a_reply_is_a_step_as_every_other_frame() -> None:
    side = answering()
    side.connection.reply(1, echo)
    assert side.feed(data(1, grpc(b"a")) * 3_000, limit=16) == []
    assert len(bodies(side.sent(), 1)) == 16 * len(grpc(b"a"))
    assert side.connection.pending


def test_before_the_answer_has_begun_there_are_no_replies() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    side.connection.reply(1, echo)
    side.connection.reply(3, echo)
    assert side.feed(data(1, grpc(b"a"))) == [Message(1, b"a")]


def test_streams_beyond_the_limit_are_refused() -> None:
    side = CallerSide(limits=Limits(max_message_bytes=10, max_streams=1)).opened()
    assert side.feed(headers(1), headers(3))[1:] == [Fault("too_many_streams")]
    assert [(f.number, f.code) for f in side.sent()] == [(3, Code.REFUSED_STREAM)]


def test_header_blocks_are_kept_once_the_peer_has_given_up_its_table() -> None:
    reader = HeaderReader(Limits(max_message_bytes=1))
    reader.request(block())
    assert not reader.known
    reader.request(NO_TABLE + block())
    request = reader.request(block())
    assert reader.known[block()] is request
    assert request.path == PATH


def test_the_number_of_known_blocks_is_bounded() -> None:
    reader = HeaderReader(Limits(max_message_bytes=1))
    reader.request(NO_TABLE + block())
    for n in range(400):
        reader.request(block(replace=[("x", str(n))]))
        assert 0 < len(reader.known) <= 256


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([("content-type", "text/html")], 415),
        ([("content-type", "application/grpcx")], 415),
        ([(":method", "GET")], 405),
    ],
)
def test_a_request_that_is_not_a_grpc_call_gets_an_http_answer(
    fields: list[tuple[str, str]], status: int
) -> None:
    side = CallerSide().opened()
    assert side.feed(headers(1, block(replace=fields))) == [Fault("no_grpc_call")]
    head, body = side.sent()
    assert side.fields(head)[":status"] == str(status)
    assert b"speaks gRPC alone" in body.payload
    assert body.ends
    assert side.feed(data(1, b"whatever", ends=True)) == []
    assert not side.connection.streams


def test_endless_continuation_frames_end_the_connection() -> None:
    side = CallerSide().opened()
    side.feed(headers(1, b"", whole=False))
    events = side.feed(*(continuation(1, b"", whole=False) for _ in range(20)))
    assert events[-1] == Fault("continuation_flood")
    side = CallerSide().opened()
    side.feed(headers(1, bytes(9000), whole=False))
    assert side.feed(continuation(1, bytes(9000), whole=False))[-1] == Fault("header_list_too_large")
