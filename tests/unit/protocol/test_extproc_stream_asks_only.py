"""Data planes that accept one destination, and data planes that ask only for the pick and show neither
path nor answer.
"""

from __future__ import annotations

import json

import pytest

from epp.protocol.asking import StreamSettings
from epp.protocol.http_events import Modes, RequestBody, RequestHeaders, ResponseHeaders, Slot
from tests.unit.protocol.stream_bench import (
    ALL,
    BODY,
    BUFFERED,
    NONE,
    OK,
    Bench,
    head,
    routed,
    run,
    slots,
    through,
)

LONG = json.dumps({"model": "m", "prompt": "tell me about foxes " * 4000}).encode()
BARE = RequestHeaders((("content-type", "application/json"),))


def test_without_a_path_and_a_mode_the_pick_is_one_address(bench: Bench) -> None:
    actions = run(bench.stream(), BARE, RequestBody(BODY, end_of_stream=True))
    assert slots(actions) == [Slot.REQUEST_HEADERS], "the picker echoes no body, because nobody waits for it"
    (answer,) = routed(actions)
    assert "," not in answer.destination
    assert bench.seen.picks[0].decision.kind == "completions", "the fields of the body show which API it is"


def test_clean_close_after_the_pick_is_no_abort_if_only_pick_was_asked_for(bench: Bench) -> None:
    stream, body = bench.stream(), RequestBody(LONG, end_of_stream=True)
    run(stream, BARE, body)
    stream.half_close(now=4.0)
    stream.check_integrity()
    assert bench.seen.over[0].decision.outcome == "detached"
    assert bench.in_flight() == 0, "the booking has ended, and from here on scrapes show the load"
    later = bench.stream()
    for event in (BARE, body):
        later.receive(event, now=1000.0)
    first, second = (pick.decision for pick in bench.seen.picks)
    assert second.chosen == first.chosen
    assert second.matched_tokens > 0, "the table keeps the prompt, because the server computes it"


def test_a_stream_that_is_cut_after_the_pick_counts_as_aborted(bench: Bench) -> None:
    stream = bench.stream()
    run(stream, BARE, RequestBody(BODY, end_of_stream=True))
    stream.close(now=4.0)
    assert bench.seen.over[0].decision.outcome == "aborted"


def test_a_clean_close_before_a_shown_answer_is_an_abort(bench: Bench) -> None:
    """Envoy ends its side in this way when the client goes away."""
    stream = through(bench)
    stream.half_close(now=4.0)
    assert bench.seen.over[0].decision.outcome == "aborted"


def test_a_clean_close_after_the_answer_ends_the_request(bench: Bench) -> None:
    stream = through(bench)
    run(stream, ResponseHeaders(OK))
    stream.half_close(now=4.0)
    assert bench.seen.over[0].decision.outcome == "ended"


def test_a_request_without_a_body_is_routed_from_its_headers(bench: Bench) -> None:
    (answer,) = routed(run(bench.stream(), RequestHeaders(BARE.headers, end_of_stream=True)))
    assert "," not in answer.destination


@pytest.mark.parametrize("modes", ALL)
def test_a_gateway_that_reads_one_address_gets_one_in_every_mode(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(max_destinations=1))
    body = [] if modes is NONE else [RequestBody(BODY, end_of_stream=True)]
    (answer,) = routed(run(bench.stream(), head(modes), *body))
    assert "," not in answer.destination
    assert bench.seen.picks[0].decision.destinations == bench.seen.picks[0].destinations[:1]


def test_the_policy_may_ask_for_fewer_than_the_gateway_can_read() -> None:
    bench = Bench(settings=StreamSettings(max_destinations=8), max_destinations=2)
    (answer,) = routed(run(bench.stream(), head(BUFFERED), RequestBody(BODY, end_of_stream=True)))
    assert len(answer.destination.split(",")) == 2


def test_the_configuration_may_say_that_the_gateway_shows_no_answers() -> None:
    bench = Bench(settings=StreamSettings(shows_answers=False))
    stream = bench.stream()
    run(stream, head(None), RequestBody(BODY, end_of_stream=True))
    stream.half_close(now=4.0)
    assert bench.seen.over[0].decision.outcome == "detached"
