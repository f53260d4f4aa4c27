"""The state machine of one HTTP request: what the picker learns and releases at the response, and when a
stream may end.
"""

from __future__ import annotations

import pytest

from epp.config.routing import Sampling
from epp.protocol.http_events import (
    Answer,
    Event,
    Modes,
    RequestBody,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from tests.unit.protocol.stream_bench import (
    BODY,
    BUFFERED,
    DUPLEX,
    NONE,
    OK,
    STREAMED,
    Bench,
    head,
    run,
    through,
)

# -- the response --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([], "aborted"),
        ([ResponseHeaders(OK)], "ended"),
        ([ResponseHeaders(OK, end_of_stream=True)], "ended"),
        ([ResponseHeaders(((":status", "404"),))], "ended"),
        ([ResponseHeaders(((":status", "503"),))], "failed"),
        ([ResponseHeaders((("status", "503"),))], "ended"),
    ],
)
def test_closing_releases_the_booking_with_the_outcome_of_the_request(
    bench: Bench, events: list[Event], outcome: str
) -> None:
    stream = through(bench)
    run(stream, *events)
    stream.close(now=9.0)
    stream.close(now=9.5)
    assert bench.in_flight() == 0
    assert [p.decision.outcome for p in bench.seen.over] == [outcome]


def test_a_stream_that_breaks_in_the_picker_counts_as_failed(bench: Bench) -> None:
    stream = through(bench)
    stream.close(now=9.0, broken=True)
    assert bench.seen.over[0].decision.outcome == "failed"


def test_the_booking_moves_to_the_endpoint_that_served(bench: Bench) -> None:
    stream = through(bench)
    pick = bench.seen.picks[0]
    run(stream, ResponseHeaders(OK, served=str(pick.destinations[1])))
    assert bench.seen.mismatches == [True]
    assert pick.decision.served == pick.destinations[1]
    (busy,) = [s.endpoint.address for s in bench.picker.fleet.states() if s.in_flight]
    assert busy == pick.destinations[1]


@pytest.mark.parametrize("served", ["", "somewhere", "10.0.0.1"])
def test_an_unreadable_served_address_changes_nothing(bench: Bench, served: str) -> None:
    run(through(bench), ResponseHeaders(OK, served=served))
    assert bench.seen.mismatches == [False]


def test_a_sampled_answer_that_is_cut_counts_as_aborted() -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench)
    run(stream, ResponseHeaders(OK), ResponseBody(b"data: x\n\n"))
    stream.close(now=9.0)
    assert bench.seen.over[0].decision.outcome == "aborted"


# -- letting go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "events", "can_detach"),
    [
        (BUFFERED, [], False),
        (BUFFERED, [ResponseHeaders(OK)], True),
        (NONE, [ResponseHeaders(OK)], True),
        (DUPLEX, [ResponseHeaders(OK)], False),
        (DUPLEX, [ResponseHeaders(OK), ResponseBody(b"x")], False),
        (DUPLEX, [ResponseHeaders(OK), ResponseBody(b"x", end_of_stream=True)], True),
        (DUPLEX, [ResponseHeaders(OK), ResponseBody(b"x"), ResponseTrailers()], True),
        (STREAMED, [ResponseHeaders(OK, end_of_stream=True)], True),
    ],
)
def test_a_stream_may_end_once_nothing_more_is_due_to_the_data_plane(
    bench: Bench, *, modes: Modes, events: list[Event], can_detach: bool
) -> None:
    stream = through(bench, modes)
    run(stream, *events)
    assert stream.can_detach is can_detach


def test_a_sampled_stream_may_be_let_go_at_a_drain() -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench)
    (answer,) = run(stream, ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert answer.stream_response
    assert stream.hold
    assert stream.can_detach


def test_a_full_duplex_request_that_is_still_coming_keeps_its_stream(bench: Bench) -> None:
    stream = bench.stream()
    run(stream, head(DUPLEX), RequestBody(BODY[:9]), ResponseHeaders(OK, end_of_stream=True))
    assert not stream.can_detach


def test_after_a_request_is_let_go_only_scrapes_show_its_load(bench: Bench) -> None:
    stream = through(bench)
    run(stream, ResponseHeaders(OK))
    stream.detach(now=5.0)
    stream.close(now=6.0)
    assert [p.decision.outcome for p in bench.seen.over] == ["detached"]
