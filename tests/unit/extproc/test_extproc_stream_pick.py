"""The state machine of one HTTP request: what decides the pick, and which requests are refused."""

from __future__ import annotations

import json

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from epp.config.routing import Cost, Load
from epp.extproc.conversation import encode
from epp.extproc.events import (
    Answer,
    Estimate,
    Event,
    Modes,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
)
from epp.extproc.settings import StreamSettings
from epp.types import SERVER_HEADERS, Address, Endpoint, EndpointName
from tests.unit.extproc.stream_bench import (
    ALL,
    BODY,
    BUFFERED,
    DUPLEX,
    EARLY,
    HEADERS,
    KEY,
    NONE,
    PARTIAL,
    STREAMED,
    A,
    B,
    Bench,
    C,
    head,
    refused,
    routed,
    run,
)

# -- what decides the pick -----------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [NONE, STREAMED])
def test_an_unread_body_still_counts_as_work_of_its_declared_length(bench: Bench, modes: Modes) -> None:
    sizes = []
    for length in ("4000", "8000"):
        run(bench.stream(), RequestHeaders(((":path", "/x"), ("content-length", length)), modes=modes))
        sizes.append(bench.seen.picks[-1].decision.prompt_tokens)
    assert sizes[1] == 2 * sizes[0] > 0


def test_a_partial_body_that_was_cut_is_routed_by_load(bench: Bench) -> None:
    actions = run(bench.stream(), head(PARTIAL), RequestBody(BODY[:200], end_of_stream=False))
    assert len(routed(actions)) == 1
    assert bench.seen.picks[0].decision.kind == "other"
    assert bench.seen.picks[0].decision.unread == "partial_body"


def test_a_body_that_would_take_too_long_is_routed_by_load_to_a_server_of_its_model(bench: Bench) -> None:
    body = b'{"model":"sql","prompt":[' + b"[]," * 200_000 + b"[]]}"
    endpoints = [
        Endpoint(name=EndpointName("a"), address=A, model="chat"),
        Endpoint(name=EndpointName("b"), address=B, model="sql"),
    ]
    bench.picker.set_endpoints(endpoints, now=0.0)
    [answer] = routed(run(bench.stream(), head(BUFFERED), RequestBody(body, end_of_stream=True)))
    decision = bench.seen.picks[0].decision
    assert (decision.unread, decision.kind, decision.prompt_chunks) == ("costly_body", "completions", 0)
    assert answer.destination == str(B)
    assert "unread=costly_body" in bench.seen.picks[0].explanation


@pytest.mark.parametrize(("modes", "unread"), [(NONE, "body_not_seen"), (STREAMED, "body_not_seen")])
def test_a_body_that_comes_after_the_pick_is_recorded_as_unread(
    bench: Bench, modes: Modes, unread: str
) -> None:
    run(bench.stream(), head(modes))
    run(bench.stream(), head(modes, end=True))
    assert [pick.decision.unread for pick in bench.seen.picks] == [unread, ""]


def test_a_compressed_body_is_routed_by_load(bench: Bench) -> None:
    event = RequestHeaders(((":path", "/v1/completions"), ("Content-Encoding", "gzip")), modes=BUFFERED)
    run(bench.stream(), event, RequestBody(b"\x1f\x8b\x08", end_of_stream=True))
    assert bench.seen.picks[0].decision.kind == "other"
    assert bench.seen.picks[0].decision.unread == "encoded_body"


@pytest.mark.parametrize(
    ("hint", "allowed"),
    [
        (("10.0.0.2:8000",), {B}),
        (("10.0.0.2:8000,[fd00::1]:8000",), {B, C}),
        ((" 10.0.0.1:8000 , nonsense", "10.0.0.2:8000"), {A, B}),
        (("[fd00:0::1]:8000",), {C}),
    ],
)
@pytest.mark.parametrize("modes", ALL)
def test_the_subset_hint_bounds_the_pick(
    bench: Bench, hint: tuple[str, ...], allowed: set[Address], modes: Modes
) -> None:
    event = RequestHeaders(HEADERS, subset=hint, modes=modes)
    run(bench.stream(), event, *([] if modes is NONE else [RequestBody(BODY, end_of_stream=True)]))
    assert set(bench.seen.picks[0].destinations) == allowed


@pytest.mark.parametrize(
    "hint", [(), ("",), ("nonsense",), ("10.0.0.1",), ("10.0.0.1:9",), ("fd00::1:8000",)]
)
@pytest.mark.parametrize("end", [False, True])
def test_a_subset_hint_that_allows_no_endpoint_gets_503(
    bench: Bench, *, hint: tuple[str, ...], end: bool
) -> None:
    stream = bench.stream()
    actions = run(stream, RequestHeaders(HEADERS, end_of_stream=end, subset=hint, modes=DUPLEX))
    actions += [] if end else run(stream, RequestBody(BODY, end_of_stream=True))
    assert refused(actions).status == 503
    assert refused(actions).reason == "subset_empty"


@pytest.mark.parametrize("modes", ALL)
@pytest.mark.parametrize("name", [KEY, "X-Gateway-Destination-Endpoint"])
def test_a_client_sent_destination_is_overwritten_or_removed(bench: Bench, modes: Modes, name: str) -> None:
    actions = run(
        bench.stream(),
        head(modes, (name, "6.6.6.6:1")),
        *([] if modes is NONE else [RequestBody(BODY, end_of_stream=True)]),
    )
    first = next(a for a in actions if isinstance(a, Answer))
    assert KEY in first.remove_headers or first.set_headers[0][0] == KEY
    assert "6.6.6.6" not in repr(actions)


@pytest.mark.parametrize("modes", ALL)
@pytest.mark.parametrize("name", [*SERVER_HEADERS, "X-Prefiller-Host-Port"])
def test_headers_that_servers_obey_are_removed_if_a_client_sends_them(
    bench: Bench, modes: Modes, name: str
) -> None:
    actions = run(
        bench.stream(),
        head(modes, (name, "6.6.6.6:1")),
        *([] if modes is NONE else [RequestBody(BODY, end_of_stream=True)]),
    )
    first = next(a for a in actions if isinstance(a, Answer))
    assert name.lower() in first.remove_headers
    assert "6.6.6.6" not in repr(actions)


def test_names_match_in_any_case_and_the_first_request_id_is_kept(bench: Bench) -> None:
    event = RequestHeaders(
        ((":PATH", "/v1/completions"), ("X-Request-ID", "Mine")), end_of_stream=True, modes=BUFFERED
    )
    (answer,) = run(bench.stream(), event)
    assert isinstance(answer, Answer)
    assert bench.seen.picks[0].decision.request_id == "Mine"
    assert [name for name, _ in answer.set_headers] == [KEY]


def test_a_request_without_an_id_gets_one(bench: Bench) -> None:
    (answer,) = run(bench.stream(), RequestHeaders(((":path", "/"),), end_of_stream=True, modes=BUFFERED))
    assert isinstance(answer, Answer)
    assert ("x-request-id", "made") in answer.set_headers
    assert bench.seen.picks[0].decision.request_id == "made"


def test_the_session_header_of_the_policy_reaches_the_rule() -> None:
    bench = Bench(rule="session", session_header="x-who")
    chosen = set()
    for _ in range(8):
        run(bench.stream(), head(NONE, ("X-Who", "ann")))
        chosen.add(bench.seen.picks[-1].destinations[0])
    assert len(chosen) == 1


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("10.0.0.2:8000", (B,)),
        ("10.0.0.2:8000, 10.0.0.1:8000", (B, A)),
        ("10.0.0.1", (A,)),
        ("[fd00::1]:8000", (C,)),
    ],
)
def test_a_conformance_run_can_prescribe_the_pick(wish: str, expected: tuple[Address, ...]) -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    run(bench.stream(), head(NONE, ("test-epp-endpoint-selection", wish)))
    assert bench.seen.picks[0].destinations[: len(expected)] == expected


def test_a_prescription_of_unknown_endpoints_gets_503() -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    actions = run(bench.stream(), head(NONE, ("test-epp-endpoint-selection", "1.1.1.1")))
    assert refused(actions).status == 503


def test_without_the_flag_clients_cannot_prescribe_the_pick() -> None:
    bench = Bench(rule="round-robin")
    for _ in range(3):
        run(bench.stream(), head(NONE, ("test-epp-endpoint-selection", "10.0.0.2:8000")))
    assert {p.destinations[0] for p in bench.seen.picks} == {A, B, C}


def test_scores_are_sent_if_configured() -> None:
    bench = Bench(settings=StreamSettings(scores_metadata=True))
    (answer,) = routed(run(bench.stream(), head(NONE)))
    assert {address for address, _ in answer.scores} == {str(A), str(B), str(C)}


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, EARLY, DUPLEX])
@pytest.mark.parametrize(
    ("body", "code"), [(b"{", "bad_json"), (b'{"prompt": "x"}', "no_model"), (b'{"model": "m"}', "no_prompt")]
)
def test_a_bad_body_gets_400_in_openais_shape_and_books_nothing(
    bench: Bench, modes: Modes, body: bytes, code: str
) -> None:
    stream = bench.stream()
    first = RequestHeaders(((":path", "/v1/completions"), ("x-request-id", "bad")), modes=modes)
    run(stream, first)
    refuse = refused(run(stream, RequestBody(body, end_of_stream=True)))
    assert refuse.status == 400
    assert dict(refuse.headers)["content-type"] == "application/json"
    error = json.loads(refuse.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"], error["param"]) == (code, "invalid_request_error", None)
    assert bench.seen.refusals[0][0] == "bad"
    assert bench.in_flight() == 0


def test_saturation_gets_429_with_retry_after() -> None:
    bench = Bench(load=Load(max_undone_tokens=1, when_saturated="Reject", retry_after_seconds=7), cost=Cost())
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
        assert [r.status for r in refusals] == [503]


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, EARLY, DUPLEX])
def test_a_declared_length_over_the_limit_gets_413_before_the_body(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=len(BODY) - 1))
    stream = bench.stream()
    assert refused(run(stream, head(modes))).status == 413
    assert run(stream, RequestBody(BODY, end_of_stream=True), RequestTrailers()) == []


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, EARLY, DUPLEX])
def test_a_body_that_grows_over_the_limit_gets_413(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=len(BODY) - 1))
    stream = bench.stream()
    run(stream, RequestHeaders(HEADERS[:2], modes=modes))
    if modes in (EARLY, DUPLEX):
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


def test_the_cost_of_a_request_is_sent_if_configured() -> None:
    """A gateway's rate limit can count these tokens, and its access log can keep them."""
    bench = Bench(settings=StreamSettings(cost_metadata=True))
    (answer,) = routed(run(bench.stream(), head(BUFFERED), RequestBody(BODY, end_of_stream=True)))
    decision = bench.seen.picks[0].decision
    assert answer.cost == Estimate(decision.prompt_tokens, decision.matched_tokens, decision.predicted_s)
    assert decision.prompt_tokens > 100
    assert decision.predicted_s > 0
    told = (
        ProcessingResponse.FromString(encode(answer)).dynamic_metadata.fields["envoy.lb"].struct_value.fields
    )
    assert told["x-prefix-gateway-prompt-tokens"].number_value == decision.prompt_tokens
    assert told["x-prefix-gateway-matched-tokens"].number_value == decision.matched_tokens
    assert told["x-prefix-gateway-predicted-seconds"].number_value == decision.predicted_s


def test_the_cost_of_a_request_is_not_sent_by_default(bench: Bench) -> None:
    (answer,) = routed(run(bench.stream(), head(BUFFERED), RequestBody(BODY, end_of_stream=True)))
    assert answer.cost is None
