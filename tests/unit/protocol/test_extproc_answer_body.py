"""The body of an answer: when the picker asks for it, what the picker learns from it, and when the picker
replaces the model's name in it. The headers that the picker adds to an answer.
"""

from __future__ import annotations

import json

import pytest

from epp.config.routing import Sampling
from epp.protocol.http_events import (
    Answer,
    BodyMode,
    Echo,
    Modes,
    RequestBody,
    RequestHeaders,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Slot,
)
from epp.protocol.stream_settings import StreamSettings
from tests.unit.protocol.stream_bench import (
    BODY,
    BUFFERED,
    DUPLEX,
    HEADERS,
    NONE,
    OK,
    PARTIAL,
    STREAMED,
    Bench,
    echoed,
    rewriting,
    run,
    slots,
    through,
)


@pytest.mark.parametrize(
    ("modes", "override"),
    [
        (BUFFERED, True),
        (PARTIAL, True),
        (NONE, True),
        (Modes(BodyMode.FULL_DUPLEX_STREAMED), False),
        (STREAMED, False),
        (DUPLEX, False),
    ],
)
def test_a_sampled_answer_is_asked_for_if_the_data_plane_can_send_it(*, modes: Modes, override: bool) -> None:
    bench = Bench(sampling=Sampling(share=1))
    (answer,) = run(through(bench, modes), ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert answer.stream_response is override


@pytest.mark.parametrize("headers", [((":status", "500"),), ((":status", "404"),)])
def test_only_good_answers_are_sampled(headers: tuple[tuple[str, str], ...]) -> None:
    bench = Bench(sampling=Sampling(share=1))
    assert run(through(bench), ResponseHeaders(headers)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_no_answer_is_asked_for_if_the_gateway_forbids_mode_overrides() -> None:
    bench = Bench(settings=StreamSettings(mode_override=False), sampling=Sampling(share=1))
    assert run(through(bench), ResponseHeaders(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


@pytest.mark.parametrize("modes", [BUFFERED, STREAMED, DUPLEX])
def test_a_sampled_answer_is_learned_from_and_passed_on_unchanged(modes: Modes) -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = bench.stream()
    body = json.dumps({"model": "m", "prompt": "x" * 4000, "stream": True}).encode()
    run(stream, RequestHeaders(HEADERS[:2], modes=modes), RequestBody(body, end_of_stream=True))
    run(stream, ResponseHeaders(OK))
    text = b'data: {"choices": [{"index": 0, "text": "fox"}]}\n\ndata: {"choices": [], "usage": '
    text += b'{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
    actions = run(stream, *(ResponseBody(text[i : i + 7]) for i in range(0, len(text), 7)))
    actions += run(stream, ResponseBody(b"", end_of_stream=True))
    assert set(slots(actions)) == {Slot.RESPONSE_BODY}
    assert echoed(actions) == (text if modes is DUPLEX else b"")
    if modes is not DUPLEX:
        assert actions == [Answer(Slot.RESPONSE_BODY)] * len(actions)
    if (
        modes is not STREAMED
    ):  # In this mode the body of the request was not read, so the API of the answer is unknown.
        assert bench.seen.picks[0].decision.cached_tokens == 4
    stream.close(now=99.0)
    assert bench.seen.over[0].decision.outcome == "ended"


def test_the_debug_header_gets_the_decision_if_the_policy_allows() -> None:
    bench = Bench(debug_header="x-why")
    (answer,) = run(through(bench, BUFFERED, ("X-Why", "1")), ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert dict(answer.set_headers)["x-prefix-gateway-decision"] == bench.seen.picks[0].explanation
    assert run(through(bench), ResponseHeaders(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_without_a_debug_header_in_the_policy_no_client_gets_the_decision(bench: Bench) -> None:
    assert run(through(bench, BUFFERED, ("", "1")), ResponseHeaders(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_a_conformance_run_gets_the_address_that_served() -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    (answer,) = run(through(bench), ResponseHeaders(OK, served="10.0.0.1:8000"))
    assert isinstance(answer, Answer)
    assert answer.set_headers == (("x-conformance-test-served-endpoint", "10.0.0.1:8000"),)


def test_a_stream_that_does_not_stay_asks_for_no_answer() -> None:
    bench = Bench(settings=StreamSettings(hold_streams=False), sampling=Sampling(share=1))
    stream = through(bench)
    (answer,) = run(stream, ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert not answer.stream_response
    assert stream.can_detach


Headers = tuple[tuple[str, str], ...]


ANSWER = ((":status", "200"), ("content-type", "application/json"), ("content-length", "26"))


@pytest.mark.parametrize("trailers", [False, True])
def test_an_answer_through_the_picker_has_the_name_the_client_sent(*, trailers: bool) -> None:
    bench = Bench()
    rewriting(bench)
    stream = bench.stream()
    stream.receive(RequestHeaders(HEADERS, modes=DUPLEX), now=1.0)
    stream.receive(RequestBody(BODY, end_of_stream=True), now=1.0)
    (answer,) = stream.receive(ResponseHeaders(ANSWER), now=1.0)
    assert isinstance(answer, Answer)
    assert answer.remove_headers == ("content-length",), "the body gets shorter"
    assert not stream.passes
    actions = [*stream.receive(ResponseBody(b'{"model": "the-tar'), now=1.0)]
    actions += stream.receive(ResponseBody(b'get"}"', end_of_stream=not trailers), now=1.0)
    if trailers:
        actions += stream.receive(ResponseTrailers(), now=1.0)
        assert actions.pop() == Answer(Slot.RESPONSE_TRAILERS)
    echoes = [action for action in actions if isinstance(action, Echo)]
    assert echoes == actions
    assert b"".join(echo.data for echo in echoes) == b'{"model": "m"}"'
    assert [echo.end_of_stream for echo in echoes[:-1]] == [False] * (len(echoes) - 1)
    assert echoes[-1].end_of_stream is not trailers


@pytest.mark.parametrize(
    ("modes", "model", "headers"),
    [
        (BUFFERED, b'"m"', ANSWER),
        (DUPLEX, b'"the-target"', ANSWER),
        (DUPLEX, b'"m"', (*ANSWER[:2], ("content-encoding", "gzip"))),
    ],
)
def test_other_answers_are_passed_on_unchanged(modes: Modes, model: bytes, headers: Headers) -> None:
    """These answers do not pass here, belong to a request without a rewrite, or are compressed."""
    bench = Bench()
    rewriting(bench)
    stream = bench.stream()
    stream.receive(RequestHeaders(HEADERS, modes=modes), now=1.0)
    stream.receive(RequestBody(BODY.replace(b'"m"', model), end_of_stream=True), now=1.0)
    assert stream.receive(ResponseHeaders(headers), now=1.0) == (Answer(Slot.RESPONSE_HEADERS),)
    assert stream.passes is (modes is DUPLEX)
