"""A hostile or broken peer: the cost of each message is bounded, and the connection closes with its code."""

from collections.abc import Callable

import pytest

from epp.transport.http2.frames import PREFACE, Code, Flag, Kind, Limits, Setting, frame, settings
from epp.transport.http2.messages import Fault, Gone, Opened
from tests.harness.http2_frames import (
    NO_TABLE,
    CallerSide,
    Frame,
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

CALM = Code.ENHANCE_YOUR_CALM
FLOODS: dict[str, Callable[[int], bytes]] = {
    "rapid_reset": lambda n: headers(2 * n + 1) + reset(2 * n + 1),
    "ping_flood": lambda _: ping(),
    "settings_flood": lambda _: settings([(Setting.INITIAL_WINDOW_SIZE, 100)]),
    "empty_frame_flood": lambda n: headers(1) if not n else data(1),
    "unneeded_frame_flood": lambda n: (
        frame(Kind.PRIORITY, bytes(5), stream_id=1) if n % 2 else frame(0xFA, b"xyz")
    ),
    "header_flood": lambda n: (
        headers(2 * n + 1, whole=False)
        + continuation(2 * n + 1, b"", whole=False) * 14
        + continuation(2 * n + 1, b"", whole=True)
    ),
    "stream_error_flood": lambda n: headers(2 * n + 1, block(replace=[("connection", "x")])),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", FLOODS)
def test_a_flood_ends_the_connection_and_is_counted(reason: str) -> None:
    side = CallerSide().opened()
    for n in range(20_000):
        events = side.feed(FLOODS[reason](n))
        if side.connection.over:
            assert events[-1] == Fault(reason)
            assert side.sent()[-1].code == CALM
            break
        side.connection.data_to_send()
    else:
        pytest.fail("the connection was never ended")


@pytest.mark.slow
@pytest.mark.parametrize("reason", sorted(FLOODS.keys() - {"settings_flood"}))
def test_the_same_frames_at_the_pace_of_a_busy_data_plane_are_accepted(reason: str) -> None:
    side = CallerSide().opened()
    for n in range(2_500):
        side.now += 0.012
        side.feed(FLOODS[reason](n))
        side.connection.data_to_send()
    assert not side.connection.over


FATAL: dict[str, tuple[bytes, str]] = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", "bad_preface"),
    "no settings": (PREFACE + ping(), "no_settings"),
    "data on an idle stream": (hello() + data(1), "frame_on_idle_stream"),
    "data on no stream": (hello() + data(0), "frame_on_idle_stream"),
    "headers of a closed stream": (hello() + headers(1) + reset(1) + headers(1), "frame_on_closed_stream"),
    "a stream that is ours to open": (hello() + headers(2), "bad_stream_number"),
    "push": (hello() + frame(Kind.PUSH_PROMISE, bytes(4), stream_id=1), "push_promise"),
    "a short ping": (hello() + frame(Kind.PING, b"1"), "bad_frame_size"),
    "settings of five bytes": (hello() + frame(Kind.SETTINGS, bytes(5)), "bad_frame_size"),
    "a window above its maximum": (hello() + settings([(Setting.INITIAL_WINDOW_SIZE, 2**31)]), "bad_setting"),
    "a window that overflows": (hello() + window_update(0, 2**31 - 1), "window_overflow"),
    "padding beyond the frame": (
        hello() + headers(1) + frame(Kind.DATA, b"\x09abc", flags=Flag.PADDED, stream_id=1),
        "bad_padding",
    ),
    "a header that cannot be decoded": (hello() + headers(1, b"\xff" * 20), "unreadable_headers"),
    "three changes of the header table": (hello() + headers(1, NO_TABLE * 3 + block()), "unreadable_headers"),
    "a header list without end": (hello() + headers(1, b"\x82" * 600), "header_list_too_large"),
    "a header frame that is too long": (hello() + headers(1, bytes(17_000)), "header_list_too_large"),
    "another frame within a header block": (
        hello() + headers(1, b"\x82", whole=False) + ping(),
        "broken_header_block",
    ),
    "a frame beyond the size that we take": (
        hello() + (2**20 + 1).to_bytes(3) + bytes((0, 0, 0, 0, 0, 1)),
        "frame_too_large",
    ),
}
CODES: dict[str, Code] = {
    "frame_on_closed_stream": Code.STREAM_CLOSED,
    "bad_frame_size": Code.FRAME_SIZE_ERROR,
    "frame_too_large": Code.FRAME_SIZE_ERROR,
    "bad_setting": Code.FLOW_CONTROL_ERROR,
    "window_overflow": Code.FLOW_CONTROL_ERROR,
    "unreadable_headers": Code.COMPRESSION_ERROR,
    "header_list_too_large": CALM,
}
"""Any other violation is a PROTOCOL_ERROR."""


@pytest.mark.parametrize("what", FATAL)
def test_a_violation_of_the_protocol_ends_the_connection_with_its_code(what: str) -> None:
    wire, reason = FATAL[what]
    side = CallerSide()
    events = side.feed(wire)
    assert events[-1] == Fault(reason)
    goaway = side.sent()[-1]
    assert (goaway.kind, goaway.code) == (Kind.GOAWAY, CODES.get(reason, Code.PROTOCOL_ERROR))


def test_a_flood_of_stream_errors_ends_every_stream_including_the_last() -> None:
    side = CallerSide().opened()
    gone: list[int] = []
    for number in range(1, 4001, 2):
        events = side.feed(headers(number), window_update(number, 0))
        gone += [e.stream_id for e in events if isinstance(e, Gone)]
        if side.connection.over:
            assert side.connection.over == "stream_error_flood"
            assert gone == list(range(1, number + 1, 2))
            return
    pytest.fail("the connection was never ended")


def test_two_changes_of_the_header_table_are_allowed() -> None:
    side = CallerSide().opened()
    assert len(side.feed(headers(1, NO_TABLE * 2 + block()))) == 1


def test_header_blocks_count_by_their_bytes_until_the_clock_is_looked_at() -> None:
    side = CallerSide().opened()
    wire = [headers(number, block(replace=[("x", "y" * 500)])) for number in range(1, 9, 2)]
    assert [len(side.feed(*wire, limit=16)), len(side.feed(limit=16))] == [2, 2]


def waiting_answers(streams: int) -> CallerSide:
    """Return a connection on which the answer of each stream waits for a window."""
    side = CallerSide().opened(window=0)
    for number in range(1, 2 * streams, 2):
        side.feed(headers(number))
        side.connection.send(number, b"answer")
    side.sent()
    return side


@pytest.mark.slow
@pytest.mark.parametrize("window", ["of each stream", "of the connection"])
def test_answers_that_a_window_lets_go_are_sent_in_portions(window: str) -> None:
    if window == "of each stream":
        side = waiting_answers(1000)
        side.feed(settings([(Setting.INITIAL_WINDOW_SIZE, 100)]), limit=16)
    else:
        side = CallerSide().opened(window=2**20)
        side.feed(headers(1))
        side.connection.send(1, bytes(65_530))  # the whole window of the connection
        for number in range(3, 2003, 2):
            side.feed(headers(number))
            side.connection.send(number, b"answer")
        side.sent()
        side.feed(window_update(0, 2**20), limit=16)
    sent = [sum(f.kind == Kind.DATA for f in side.sent())]
    while side.connection.pending:
        side.feed(limit=16)
        sent.append(sum(f.kind == Kind.DATA for f in side.sent()))
    assert (sum(sent), max(sent) <= 16) == (1000, True)


def test_small_answers_that_waited_are_sent_in_one_frame() -> None:
    side = CallerSide().opened(window=0)
    side.feed(headers(1))
    for _ in range(1000):
        side.connection.send(1, b"a")
    side.feed(window_update(1, 10_000))
    assert [len(f.payload) for f in side.sent() if f.kind == Kind.DATA] == [6000]


def test_while_many_answers_wait_the_window_of_the_connection_stays_closed() -> None:
    """A peer opens many streams, has all its messages sent back, and reads none of them."""
    side = CallerSide(limits=Limits(max_message_bytes=20_000)).opened(window=0)
    window, number = 2**24, 1
    while window >= 8192:
        for _ in side.feed(headers(number), data(number, grpc(bytes(8187))))[1:]:
            side.connection.send(number, bytes(8187))
        window -= 8192
        window += sum(int.from_bytes(f.payload) for f in side.sent() if f.kind == Kind.WINDOW_UPDATE)
        number += 2
    assert 2**24 < side.connection.unsent == side.held.unsent <= 2**23 + 2**24
    side.feed(window_update(0, 2**25), settings([(Setting.INITIAL_WINDOW_SIZE, 20_000)]))
    assert side.connection.unsent == side.held.unsent == 0
    assert any(f.kind == Kind.WINDOW_UPDATE and not f.number for f in side.sent())


def test_a_reset_ends_a_call_once() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    assert side.feed(reset(1), reset(1)) == [Gone(1)]
    side.connection.send(1, b"late")
    side.connection.end(1)
    assert side.sent() == []


def test_a_graceful_shutdown_takes_two_steps() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    side.connection.leave(now=side.now)
    (goaway,) = side.sent()
    assert (int.from_bytes(goaway.payload[:4]), goaway.code) == (2**31 - 1, Code.NO_ERROR)
    assert isinstance(side.feed(headers(3))[0], Opened), "a call that was on its way is served"
    assert side.connection.close(now=side.now) == [Gone(1), Gone(3)]
    (goaway,) = side.sent()
    assert (int.from_bytes(goaway.payload[:4]), goaway.code) == (3, Code.NO_ERROR)
    assert side.connection.close(now=side.now) == []


def test_the_server_sends_its_settings_and_window_first() -> None:
    first, second = CallerSide().greeting
    assert (first.kind, second.kind) == (Kind.SETTINGS, Kind.WINDOW_UPDATE)
    answers = {
        int.from_bytes(first.payload[n : n + 2]): int.from_bytes(first.payload[n + 2 : n + 6])
        for n in range(0, 30, 6)
    }
    assert answers[Setting.HEADER_TABLE_SIZE] == 0
    assert answers[Setting.INITIAL_WINDOW_SIZE] == 2**20


def test_stream_of_a_refused_client_that_never_ends_is_reset_after_a_time() -> None:
    side = CallerSide().opened()
    side.feed(headers(1, block(replace=[("content-type", "text/html")])))
    side.sent()
    side.tick(9)
    assert len(side.connection.streams) == 1
    side.tick(2)
    assert [(f.kind, f.code) for f in side.sent()] == [(Kind.RST_STREAM, Code.NO_ERROR)]
    assert not side.connection.streams


@pytest.mark.parametrize("calls", [b"", headers(1)])
def test_a_silent_client_gets_a_ping_and_is_then_disconnected(calls: bytes) -> None:
    side = CallerSide().opened()
    side.feed(calls)
    side.tick(61)
    (question,) = side.sent()
    side.feed(ping(question.payload, ack=True))
    side.tick(50)
    assert side.sent() == []
    side.tick(11)
    assert len(side.sent()) == 1
    assert side.tick(21)[-1] == Fault("peer_gone")


def wait(side: CallerSide, seconds: int) -> list[Frame]:
    """Let time pass for a peer that answers each PING of ours. Return what it got besides these."""
    got: list[Frame] = []
    for _ in range(seconds):
        assert side.tick(1) == []
        for each in side.sent():
            if each.kind == Kind.PING:
                side.feed(ping(each.payload, ack=True))
            else:
                got.append(each)
    return got


def test_a_connection_without_calls_for_5_minutes_is_left_gracefully() -> None:
    side = CallerSide().opened()
    assert wait(side, 299) == []
    (goaway,) = wait(side, 3)
    assert (goaway.kind, goaway.code) == (Kind.GOAWAY, Code.NO_ERROR)
    assert isinstance(side.feed(headers(1))[0], Opened), "a call that was on its way is served"
    assert wait(side, 60) == []
    side.connection.end(1)
    assert [frame.kind for frame in wait(side, 19)] == [Kind.HEADERS, Kind.RST_STREAM]
    assert (side.tick(3), side.connection.over) == ([], "closed")


def test_a_connection_with_an_open_call_is_not_idle_until_its_end() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    assert wait(side, 900) == []
    side.feed(reset(1))
    assert wait(side, 299) == []
    side.feed(headers(3), reset(3))
    assert wait(side, 299) == []
    assert [frame.kind for frame in wait(side, 3)] == [Kind.GOAWAY]


def test_an_idle_peer_that_does_not_hear_our_leaving_is_disconnected() -> None:
    side = CallerSide().opened()
    assert [frame.kind for frame in wait(side, 319)] == [Kind.GOAWAY]
    assert (side.tick(3), side.connection.over) == ([], "closed")


@pytest.mark.parametrize(
    ("wire", "seconds", "reason"),
    [
        (PREFACE[:10], 11, "no_hello"),
        (b"", 11, "no_hello"),
        (PREFACE, 11, "no_hello"),
        (hello() + headers(1, b"\x82", whole=False), 11, "unfinished_headers"),
    ],
)
def test_unfinished_preface_or_header_block_ends_the_connection_after_time(
    wire: bytes, seconds: float, reason: str
) -> None:
    side = CallerSide()
    side.feed(wire)
    assert side.tick(seconds - 2) == []
    assert side.tick(2)[-1] == Fault(reason)


def test_a_stream_whose_window_never_opens_is_ended_after_a_time() -> None:
    side = CallerSide().opened(window=0)
    side.feed(headers(1), headers(3))
    side.connection.send(1, b"x" * 1000)
    side.sent()
    for _ in range(10):
        assert side.tick(29) == []
        side.feed(ping())
    assert side.tick(29) == [Gone(1), Fault("window_never_opened")]
    assert len(side.connection.streams) == 1


def test_a_message_that_stays_unfinished_ends_its_call_after_a_time() -> None:
    side = CallerSide().opened()
    side.feed(headers(1), data(1, grpc(b"hello")[:-1]))
    side.now += 31
    side.held.expire(began_before=side.now - side.limits.message_s)
    assert side.tick(0) == [Fault("message_too_slow"), Gone(1)]
    assert side.status(side.sent())[0] == 8
