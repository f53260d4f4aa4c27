"""Frames that carry no part of a call, and our own leaving."""

from __future__ import annotations

from epp.transport.http2.call_events import Fault, Gone, Opened
from epp.transport.http2.frames import Code, Flag, Kind, Setting, settings
from tests.harness.http2_frames import CallerSide, bodies, headers, ping, reset, window_update


def test_change_of_the_initial_window_changes_the_windows_of_open_streams() -> None:
    side = CallerSide().opened(window=10)
    side.feed(headers(1))
    side.connection.send(1, b"x" * 20)
    side.sent()
    side.feed(settings([(Setting.INITIAL_WINDOW_SIZE, 3)]), window_update(1, 7))
    assert bodies(side.sent(), 1) == b"", "ten bytes were sent, and seven more are allowed"
    side.feed(settings([(Setting.INITIAL_WINDOW_SIZE, 100)]))
    assert len(bodies(side.sent(), 1)) == 15


def test_a_reset_ends_a_call_once() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    assert side.feed(reset(1), reset(1)) == [Gone(1, "reset")]
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
    assert not side.connection.drained
    side.connection.end(1)
    side.connection.end(3)
    assert side.connection.drained


def test_a_ping_is_answered() -> None:
    side = CallerSide().opened()
    side.feed(ping(b"abcdefgh"))
    (answer,) = side.sent()
    assert (answer.kind, answer.flags, answer.payload) == (Kind.PING, Flag.ACK, b"abcdefgh")
