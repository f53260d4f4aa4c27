"""Bodies that come in pieces: which bytes go back, and the room that all bodies share."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.config.policy import LoadSettings
from epp.protocol.http_events import Body, BodyRoom, Refuse
from epp.protocol.settings import StreamSettings
from epp.protocol.stream import HttpStream
from tests.harness.steps import steps
from tests.invariants.protocol import check_stream, held_bytes
from tests.unit.protocol.stream_bench import (
    BODY,
    DUPLEX,
    Bench,
    echoed,
    head,
    refused,
    request_body,
    request_headers,
    routed,
    run,
)


@given(pieces=st.lists(st.binary(max_size=9), max_size=9))
def test_a_body_is_its_pieces_joined(pieces: list[bytes]) -> None:
    room = BodyRoom(10)
    body = Body(room)
    fits = [not body.add(piece, last=False) for piece in pieces]
    assert fits == [sum(map(len, pieces[: n + 1])) <= 10 for n in range(len(pieces))]
    assert len(body) == room.held_bytes == len(b"".join(pieces))
    assert bytes(body.take()) == b"".join(pieces)
    assert (len(body), room.held_bytes) == (0, 0)


class Streams(RuleBasedStateMachine):
    """Requests begin, go on, end, break off and are let go, in any order. The room is too small for all of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(settings=StreamSettings(room=BodyRoom(3000), max_body_bytes=2500))
        self.open: list[HttpStream] = []
        self.now = 0.0

    @rule()
    def begin(self) -> None:
        stream = self.bench.stream()
        stream.receive(request_headers(((":path", "/v1/completions"),), modes=DUPLEX), now=self.now)
        self.open.append(stream)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), size=st.sampled_from([1, 700, 2000]), last=st.booleans())
    def go_on(self, *, data: st.DataObject, size: int, last: bool) -> None:
        stream = data.draw(st.sampled_from(self.open))
        self.now += 1.0
        piece = (b'{"model":"m","prompt":"' + b"x" * size)[-size:]
        stream.receive(request_body(piece, end_of_stream=last), now=self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), broken=st.booleans(), let_go=st.booleans())
    def end(self, *, data: st.DataObject, broken: bool, let_go: bool) -> None:
        stream = data.draw(st.sampled_from(self.open))
        self.open.remove(stream)
        if let_go:
            stream.close(now=self.now, goes_on=True)
        stream.close(now=self.now, broken=broken)

    @invariant()
    def the_room_holds_what_its_streams_hold(self) -> None:
        for stream in self.open:
            check_stream(stream)
        room = self.bench.settings.room
        assert room.held_bytes == sum(map(held_bytes, self.open))
        assert room.held_bytes <= room.max_bytes

    def teardown(self) -> None:
        for stream in self.open:
            stream.close(now=self.now)
        assert self.bench.settings.room.held_bytes == 0


TestStreams = pytest.mark.slow(Streams.TestCase)


# -- without room --------------------------------------------------------------------------------------------


def test_a_body_without_room_is_passed_on_unread_and_complete() -> None:
    bench = Bench(settings=StreamSettings(room=BodyRoom(len(BODY) + 100)))
    waiting = bench.stream()
    run(waiting, head(DUPLEX), request_body(BODY[:200]))
    stream = bench.stream()
    actions = run(
        stream, head(DUPLEX), request_body(BODY[:-50]), request_body(BODY[-50:], end_of_stream=True)
    )
    assert len(routed(actions)) == 1
    assert echoed(actions) == BODY
    assert bench.seen.picks[0].decision.unread == "no_room"
    actions = run(waiting, request_body(BODY[200:], end_of_stream=True))
    assert (len(routed(actions)), echoed(actions)) == (1, BODY)
    assert bench.seen.picks[1].decision.unread == ""


def test_a_body_without_room_is_refused_if_the_policy_refuses_at_overload() -> None:
    load = LoadSettings(when_saturated="Reject", retry_after_seconds=7)
    bench = Bench(settings=StreamSettings(room=BodyRoom(100)), load=load)
    stream = bench.stream()
    answer = refused(run(stream, head(DUPLEX), request_body(BODY)))
    assert isinstance(answer, Refuse)
    assert (answer.status, answer.reason) == (429, "no_room")
    assert ("retry-after", "7") in answer.headers
    assert bench.settings.room.held_bytes == 0


# -- tiny pieces ---------------------------------------------------------------------------------------------


def in_pieces_of_one_byte(size: int) -> None:
    """Send nested objects in a body that stays open."""
    stream = Bench().stream()
    stream.receive(request_headers(((":path", "/v1/completions"),), modes=DUPLEX), now=0.0)
    for byte in (b'{"a":' * size)[:size]:
        stream.receive(request_body(bytes((byte,))), now=0.0)
    stream.close(now=1.0)


def test_the_work_for_tiny_pieces_grows_with_their_number_and_no_faster() -> None:
    """An earlier version joined and parsed all pieces each time: 24.8 s for 24 KB. Ten times as many
    pieces took a hundred times as long.
    """
    few, many = (steps(lambda: in_pieces_of_one_byte(size)) for size in (500, 5_000))  # noqa: B023 - called at once
    assert many < 11 * few


def test_tiny_pieces_are_held_as_their_bytes() -> None:
    body = Body(BodyRoom())
    for n in range(10_000):
        body.add(random.Random(n).randbytes(1), last=False)
    assert isinstance(body.take(), memoryview), "one buffer, not ten thousand pieces"
