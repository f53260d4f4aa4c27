"""Requests that are refused: with which status, in the format of which API, and when."""

from __future__ import annotations

import json

import pytest

from epp.config.routing import Cost, LoadSettings
from epp.protocol.asking import StreamSettings
from epp.protocol.http_events import (
    Event,
    Modes,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
)
from tests.unit.protocol.stream_bench import (
    ALL,
    BODY,
    BUFFERED,
    DUPLEX,
    HEADERS,
    PARTIAL,
    Bench,
    head,
    refused,
    run,
)


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, DUPLEX])
def test_a_bad_body_gets_400_in_openais_shape_and_books_nothing(bench: Bench, modes: Modes) -> None:
    stream = bench.stream()
    first = RequestHeaders(((":path", "/v1/completions"), ("x-request-id", "bad")), modes=modes)
    run(stream, first)
    refuse = refused(run(stream, RequestBody(b"{", end_of_stream=True)))
    assert refuse.status == 400
    assert dict(refuse.headers)["content-type"] == "application/json"
    error = json.loads(refuse.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"], error["param"]) == ("bad_json", "invalid_request_error", None)
    assert bench.seen.refusals[0][0] == "bad"
    assert bench.in_flight() == 0


def test_saturation_gets_429_with_retry_after() -> None:
    bench = Bench(
        load=LoadSettings(max_undone_tokens=1, when_saturated="Reject", retry_after_seconds=7), cost=Cost()
    )
    for _ in range(12):
        stream = bench.stream()
        last = run(stream, head(BUFFERED), RequestBody(BODY, end_of_stream=True))[-1]
        if isinstance(last, Refuse):
            break
    assert isinstance(last, Refuse)
    assert last.status == 429
    assert dict(last.headers)["retry-after"] == "7"


@pytest.mark.parametrize("modes", ALL)
def test_no_endpoint_gets_503(bench: Bench, modes: Modes) -> None:
    bench.set_endpoints()
    cases: list[list[Event]] = [[head(modes), RequestBody(BODY, end_of_stream=True)], [head(modes, end=True)]]
    for events in cases:
        stream = bench.stream()
        refusals = [a for e in events for a in run(stream, e) if isinstance(a, Refuse)]
        assert [(r.status, r.reason) for r in refusals] == [(503, "no_ready_endpoint")]
    assert bench.in_flight() == 0


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, DUPLEX])
def test_a_declared_length_over_the_limit_gets_413_before_the_body(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=len(BODY) - 1))
    stream = bench.stream()
    assert refused(run(stream, head(modes))).status == 413
    assert run(stream, RequestBody(BODY, end_of_stream=True), RequestTrailers()) == []


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, DUPLEX])
def test_a_body_that_grows_over_the_limit_gets_413(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=len(BODY) - 1))
    stream = bench.stream()
    run(stream, RequestHeaders(HEADERS[:2], modes=modes))
    if modes is DUPLEX:
        assert run(stream, RequestBody(BODY[:60])) == []
        assert refused(run(stream, RequestBody(BODY[60:]))).status == 413
    else:
        assert refused(run(stream, RequestBody(BODY))).status == 413
    assert bench.in_flight() == 0
    assert run(stream, RequestBody(b"more", end_of_stream=True), RequestTrailers()) == []


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [
        ("/v1/messages", True),
        ("/team/v1/messages?beta=true", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/chat/completions", False),
        ("/v1/messagesX", False),
    ],
)
def test_an_error_has_the_shape_that_the_clients_of_its_api_read(path: str, *, anthropic: bool) -> None:
    bench = Bench()
    bench.set_endpoints()
    event = RequestHeaders(((":path", path), ("x-request-id", "r1")), modes=BUFFERED)
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    answer = refused(run(bench.stream(), event, RequestBody(body, end_of_stream=True))[1:])
    assert answer.status == 503
    told = json.loads(answer.body)
    if anthropic:
        message = told["error"].pop("message")
        assert told == {"type": "error", "error": {"type": "overloaded_error"}, "request_id": "r1"}
    else:
        message = told["error"]["message"]
        assert told["error"]["code"] == "no_ready_endpoint"
    assert "no model server is ready" in message


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [(b"{", 400, "invalid_request_error"), (b"x" * 2000, 413, "request_too_large")],
)
def test_anthropics_clients_get_the_type_of_the_error(body: bytes, status: int, kind: str) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=1000))
    event = RequestHeaders(((":path", "/v1/messages"),), modes=BUFFERED)
    answer = refused(run(bench.stream(), event, RequestBody(body, end_of_stream=True))[1:])
    assert (answer.status, json.loads(answer.body)["error"]["type"]) == (status, kind)
