"""The first bytes, frames that carry no part of a call, our own leaving, and a peer that takes too long: at
its beginning, in a call, with its windows, in silence.
"""

from __future__ import annotations

import pytest

from epp.transport.http2.frames import PREFACE, Code, Flag, Kind, Setting
from epp.transport.http2.messages import Fault, Gone, Opened
from tests.harness.http2_frames import (
    CallerSide,
    Frame,
    block,
    data,
    grpc,
    headers,
    hello,
    ping,
    reset,
)


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
    goaway, question = side.sent()
    assert (int.from_bytes(goaway.payload[:4]), goaway.code) == (2**31 - 1, Code.NO_ERROR)
    assert isinstance(side.feed(headers(3))[0], Opened), "a call that was on its way is served"
    side.feed(ping(question.payload, ack=True))
    (goaway,) = side.sent()
    assert int.from_bytes(goaway.payload[:4]) == 3
    assert side.feed(headers(5)) == [Fault("too_many_streams")]
    assert side.sent()[0].code == Code.REFUSED_STREAM
    assert not side.connection.ends
    side.connection.end(1)
    side.connection.end(3)
    assert side.connection.ends


def test_a_ping_is_answered() -> None:
    side = CallerSide().opened()
    side.feed(ping(b"abcdefgh"))
    (answer,) = side.sent()
    assert (answer.kind, answer.flags, answer.payload) == (Kind.PING, Flag.ACK, b"abcdefgh")


def test_the_server_sends_its_settings_and_window_first() -> None:
    first, second = CallerSide().greeting
    assert (first.kind, second.kind) == (Kind.SETTINGS, Kind.WINDOW_UPDATE)
    said = {
        int.from_bytes(first.payload[n : n + 2]): int.from_bytes(first.payload[n + 2 : n + 6])
        for n in range(0, 30, 6)
    }
    assert said[Setting.HEADER_TABLE_SIZE] == 0
    assert said[Setting.INITIAL_WINDOW_SIZE] == 2**20


def test_stream_of_a_refused_client_that_never_ends_is_reset_after_a_time() -> None:
    side = CallerSide().opened()
    side.feed(headers(1, block(replace=[("content-type", "text/html")])))
    side.sent()
    side.tick(9)
    assert side.connection.streams == 1
    side.tick(2)
    assert [(f.kind, f.code) for f in side.sent()] == [(Kind.RST_STREAM, Code.NO_ERROR)]
    assert side.connection.streams == 0


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
        for frame in side.sent():
            if frame.kind == Kind.PING and frame.payload != b"draining":
                side.feed(ping(frame.payload, ack=True))
            else:
                got.append(frame)
    return got


def test_a_connection_without_calls_for_5_minutes_is_left_gracefully() -> None:
    side = CallerSide().opened()
    assert wait(side, 299) == []
    goaway, question = wait(side, 3)
    assert (goaway.kind, goaway.code, side.connection.closing) == (Kind.GOAWAY, Code.NO_ERROR, True)
    assert isinstance(side.feed(headers(1))[0], Opened), "a call that was on its way is served"
    side.feed(ping(question.payload, ack=True))
    assert not side.connection.ends
    side.connection.end(1)
    assert side.connection.ends


def test_a_connection_with_an_open_call_is_not_idle_until_its_end() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    assert wait(side, 900) == []
    side.feed(reset(1))
    assert wait(side, 299) == []
    side.feed(headers(3), reset(3))
    assert wait(side, 299) == []
    assert [frame.kind for frame in wait(side, 3)] == [Kind.GOAWAY, Kind.PING]


def test_an_idle_peer_that_does_not_hear_our_leaving_is_disconnected() -> None:
    side = CallerSide().opened()
    assert [frame.kind for frame in wait(side, 319)] == [Kind.GOAWAY, Kind.PING]
    assert side.tick(3)[-1] == Fault("peer_gone")


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
    assert side.connection.streams == 1


def test_a_message_that_stays_unfinished_ends_its_call_after_a_time() -> None:
    side = CallerSide().opened()
    side.feed(headers(1), data(1, grpc(b"hello")[:-1]))
    side.now += 31
    side.held.expire(began_before=side.now - side.limits.message_s)
    assert side.tick(0) == [Fault("message_too_slow"), Gone(1)]
    assert side.status(side.sent())[0] == 8
