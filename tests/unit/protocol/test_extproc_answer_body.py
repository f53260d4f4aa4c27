"""The body of an answer: when the picker asks for it, and what the picker learns from it. The headers that
the picker adds to an answer.
"""

from __future__ import annotations

import json

import pytest

from epp.config.routing import Sampling
from epp.protocol.asking import StreamSettings
from epp.protocol.http_events import (
    Answer,
    BodyMode,
    Modes,
    RequestBody,
    RequestHeaders,
    ResponseBody,
    ResponseHeaders,
    Slot,
)
from tests.unit.protocol.stream_bench import (
    BUFFERED,
    DUPLEX,
    HEADERS,
    NONE,
    OK,
    PARTIAL,
    STREAMED,
    Bench,
    echoed,
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
