"""The state machine of one HTTP request, without a transport."""

import random

import pytest

from epp.protocol.http_events import (
    Answer,
    HttpEvent,
    Modes,
    Piece,
    Refuse,
    Slot,
    StreamProtocolError,
)
from tests.unit.protocol.stream_bench import (
    ALL,
    BODY,
    BUFFERED,
    DUPLEX,
    GRPC,
    HEADERS,
    KEY,
    NONE,
    OK,
    PARTIAL,
    STREAMED,
    Bench,
    echoed,
    head,
    only,
    refused,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
    routed,
    run,
    slots,
    whole,
)

# -- the order of answers in each mode -----------------------------------------------------------------------

H, D, T = Slot.REQUEST_HEADERS, Slot.REQUEST_BODY, Slot.REQUEST_TRAILERS


@pytest.mark.parametrize(
    ("modes", "expected", "destination_in", "kind"),
    [
        (BUFFERED, [H, D], D, "completions"),
        (PARTIAL, [H, D], D, "completions"),
        (STREAMED, [H, D], H, "other"),
        (DUPLEX, [H, D], H, "completions"),
        (GRPC, [H, D], H, "completions"),
        (NONE, [H], H, "other"),
        (None, [H, D], H, "completions"),  # a data plane that states no mode is taken to use full duplex
    ],
)
def test_each_mode_gets_its_answers_in_order_with_the_pick_in_one_of_them(
    bench: Bench, modes: Modes | None, expected: list[Slot], destination_in: Slot, kind: str
) -> None:
    stream = bench.stream()
    actions = run(stream, *whole(modes))
    assert slots(actions) == expected
    (answer,) = routed(actions)
    assert answer.slot is destination_in
    assert answer.set_headers == ((KEY, answer.destination),)
    assert sorted(answer.destination.split(",")) == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
    assert bench.seen.picks[0].decision.kind == kind
    assert echoed(actions) == (BODY if modes in (DUPLEX, GRPC, None) else b"")


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, STREAMED, NONE])
def test_headers_are_answered_at_once_if_the_data_plane_waits_for_answer(bench: Bench, modes: Modes) -> None:
    assert slots(run(bench.stream(), head(modes))) == [H]


@pytest.mark.parametrize("modes", [DUPLEX, GRPC])
def test_headers_are_answered_after_a_body_that_comes_anyway(bench: Bench, modes: Modes) -> None:
    stream = bench.stream()
    assert run(stream, head(modes), request_body(BODY[:100])) == []
    assert slots(run(stream, request_body(BODY[100:], end_of_stream=True)))[0] is H


@pytest.mark.parametrize("size_bytes", [0, 1, 61_999, 62_000, 62_001, 124_000, 400_000])
@pytest.mark.parametrize("ends_in_trailers", [False, True])
def test_full_duplex_sends_the_body_back_in_pieces_within_the_limit(
    bench: Bench, *, size_bytes: int, ends_in_trailers: bool
) -> None:
    body = random.Random(size_bytes).randbytes(size_bytes)
    stream = bench.stream()
    first = request_headers(((":path", "/upload"),), modes=DUPLEX)
    if ends_in_trailers:
        actions = run(stream, first, request_body(body), request_trailers())
    else:
        actions = run(stream, first, request_body(body, end_of_stream=True))
    assert slots(actions)[0] is H
    pieces = [a for a in actions if isinstance(a, Piece)]
    assert b"".join(bytes(p.data) for p in pieces) == body
    assert all(len(p.data) <= 62_000 for p in pieces)
    ends = [p.end_of_stream for p in pieces]
    if ends_in_trailers:
        assert not any(ends)
        assert slots(actions)[-1] is T
    else:
        assert ends.count(True) == 1
        assert ends[-1]


@pytest.mark.parametrize("modes", ALL)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_without_a_body_is_routed_from_its_headers(bench: Bench, modes: Modes, method: str) -> None:
    event = request_headers(((":method", method), (":path", "/v1/models")), end_of_stream=True, modes=modes)
    answer = only(run(bench.stream(), event))
    assert answer.slot is H
    assert answer.destination
    assert bench.seen.picks[0].decision.kind == "other"


def test_each_chunk_of_a_streamed_body_is_answered_unread(bench: Bench) -> None:
    chunks = [
        request_body(BODY[i : i + 50], end_of_stream=i + 50 >= len(BODY)) for i in range(0, len(BODY), 50)
    ]
    actions = run(bench.stream(), head(STREAMED), *chunks)
    assert slots(actions) == [H] + [D] * len(chunks)


def test_buffered_body_without_bytes_before_trailers_is_routed_by_metadata(bench: Bench) -> None:
    actions = run(bench.stream(), head(BUFFERED), request_trailers())
    assert slots(actions) == [H, T]
    (answer,) = routed(actions)
    assert answer.slot is T
    assert answer.set_headers == ()


def test_trailers_after_a_buffered_body_pass(bench: Bench) -> None:
    actions = run(bench.stream(), head(BUFFERED), request_body(BODY), request_trailers())
    assert slots(actions) == [H, D, T]
    assert len(routed(actions)) == 1


# -- odd peers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([head(BUFFERED), head(BUFFERED)], "second_request_headers"),
        ([head(NONE), response_headers(OK), response_headers(OK)], "second_response_headers"),
    ],
)
def test_impossible_messages_are_a_typed_error(bench: Bench, events: list[HttpEvent], reason: str) -> None:
    stream = bench.stream()
    run(stream, *events[:-1])
    with pytest.raises(StreamProtocolError, match=reason):
        stream.receive(events[-1], now=5.0)


def test_a_message_after_the_end_is_an_error(bench: Bench) -> None:
    stream = bench.stream()
    stream.close(now=1.0)
    with pytest.raises(StreamProtocolError, match="event_after_end"):
        stream.receive(head(NONE), now=2.0)
    assert bench.in_flight() == 0


def test_a_body_without_headers_passes_and_is_reported(bench: Bench) -> None:
    actions = run(bench.stream(), request_body(b"abc", end_of_stream=True, modes=BUFFERED))
    assert actions == [Answer(D)]
    assert bench.seen.faults == ["body_before_headers"]


@pytest.mark.parametrize("modes", ALL)
def test_a_response_before_the_pick_means_that_no_pick_is_made(bench: Bench, modes: Modes) -> None:
    stream = bench.stream()
    early = response_headers(((":status", "413"),), modes=modes)
    actions = run(stream, early, head(None, (KEY, "6.6.6.6:1")), request_body(BODY, end_of_stream=True))
    assert routed(actions) == []
    assert bench.in_flight() == 0
    assert not any(isinstance(a, Refuse) for a in actions)


def test_a_response_while_the_body_is_held_still_lets_the_body_pass(bench: Bench) -> None:
    stream = bench.stream()
    run(stream, head(DUPLEX), request_body(BODY[:9]), response_headers(((":status", "408"),)))
    actions = run(stream, request_body(BODY[9:], end_of_stream=True))
    assert slots(actions) == [H, D]
    assert echoed(actions) == BODY
    assert routed(actions) == []


def test_nothing_is_answered_after_a_refusal(bench: Bench) -> None:
    stream = bench.stream()
    refused(run(stream, request_headers(HEADERS[:2], modes=DUPLEX), request_body(b"{", end_of_stream=True)))
    assert run(stream, request_trailers(), response_headers(OK)) == []
