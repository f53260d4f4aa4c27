"""Requests that the picker answers itself: refusals, the list of models, aliases."""

import json

import pytest

from epp.base.types import EndpointName, ModelCard, ModelList
from epp.config.policy import Cost, LoadSettings
from epp.protocol.codec import encode
from epp.protocol.http_events import Action, Answer, HttpEvent, Modes, Piece, Refuse
from epp.protocol.settings import StreamSettings
from tests.unit.protocol.stream_bench import (
    ALL,
    BODY,
    BUFFERED,
    DUPLEX,
    HEADERS,
    PARTIAL,
    B,
    Bench,
    C,
    head,
    only,
    refused,
    request_body,
    request_headers,
    request_trailers,
    rewriting,
    run,
)


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, DUPLEX])
def test_a_bad_body_gets_400_in_openais_shape_and_books_nothing(bench: Bench, modes: Modes) -> None:
    stream = bench.stream()
    first = request_headers(((":path", "/v1/completions"), ("x-request-id", "bad")), modes=modes)
    run(stream, first)
    refuse = refused(run(stream, request_body(b"{", end_of_stream=True)))
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
        last = run(stream, head(BUFFERED), request_body(BODY, end_of_stream=True))[-1]
        if isinstance(last, Refuse):
            break
    assert isinstance(last, Refuse)
    assert last.status == 429
    assert dict(last.headers)["retry-after"] == "7"


@pytest.mark.parametrize("modes", ALL)
def test_no_endpoint_gets_503(bench: Bench, modes: Modes) -> None:
    bench.set_endpoints()
    cases: list[list[HttpEvent]] = [
        [head(modes), request_body(BODY, end_of_stream=True)],
        [head(modes, end=True)],
    ]
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
    assert run(stream, request_body(BODY, end_of_stream=True), request_trailers()) == []


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, DUPLEX])
def test_a_body_that_grows_over_the_limit_gets_413(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=len(BODY) - 1))
    stream = bench.stream()
    run(stream, request_headers(HEADERS[:2], modes=modes))
    if modes is DUPLEX:
        assert run(stream, request_body(BODY[:60])) == []
        assert refused(run(stream, request_body(BODY[60:]))).status == 413
    else:
        assert refused(run(stream, request_body(BODY))).status == 413
    assert bench.in_flight() == 0
    assert run(stream, request_body(b"more", end_of_stream=True), request_trailers()) == []


CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
GHOST = CHAT.replace(b'"m"', b'"ghost"')


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/messages", CHAT, 503, "overloaded_error"),
        ("/team/v1/messages?beta=true", CHAT, 503, "overloaded_error"),
        ("/v1/messages/count_tokens", CHAT, 503, "overloaded_error"),
        ("/v1/messages", b"{", 400, "invalid_request_error"),
        ("/v1/messages", b"x" * 2000, 413, "request_too_large"),
        ("/v1/messages", GHOST, 404, "not_found_error"),
        ("/v1/chat/completions", CHAT, 503, ""),
        ("/v1/chat/completions", GHOST, 404, ""),
        ("/v1/messagesX", CHAT, 503, ""),
    ],
)
def test_an_error_has_the_shape_that_the_clients_of_its_api_read(
    path: str, body: bytes, status: int, kind: str
) -> None:
    bench = Bench(settings=StreamSettings(max_body_bytes=1000))
    if status == 503:
        bench.set_endpoints()
    listed_by(bench, "m", "n", "n")
    event = request_headers(((":path", path), ("x-request-id", "r1")), modes=BUFFERED)
    answer = refused(run(bench.stream(), event, request_body(body, end_of_stream=True))[1:])
    assert answer.status == status
    error = json.loads(answer.body)
    message = error["error"].pop("message")
    if kind:
        assert error == {"type": "error", "error": {"type": kind}, "request_id": "r1"}
    else:
        assert error["error"]["code"] == ("model_not_found" if status == 404 else "no_ready_endpoint")
    assert {404: "ghost", 503: "no model server is ready"}.get(status, "") in message


def listed_by(bench: Bench, *names: str) -> None:
    """Let the first servers of the bench list these models, one each."""
    lists = {EndpointName(f"e{n}"): ModelList((ModelCard(name),)) for n, name in enumerate(names)}
    bench.picker.news.take_lists(lists, now=0.0)


@pytest.mark.parametrize("modes", [*ALL, None])
def test_the_list_of_models_is_answered_from_what_the_servers_list(modes: Modes | None) -> None:
    bench = Bench()
    listed_by(bench, "m", "n")
    for path in ("/v1/models", "/v1/models/?limit=20", "/prefix/v1/models"):
        event = request_headers(((":method", "GET"), (":path", path)), end_of_stream=True, modes=modes)
        (answer,) = bench.stream().receive(event, now=1.0)
        assert isinstance(answer, Refuse)
        assert (answer.status, answer.reason) == (200, "model_list")
        assert [card["id"] for card in json.loads(answer.body)["data"]] == ["m", "n"]
    assert bench.in_flight() == 0


def test_the_list_of_models_is_that_of_the_subset_if_there_is_one() -> None:
    bench = Bench()
    listed_by(bench, "m", "n")
    asked = ((":method", "GET"), (":path", "/v1/models"))
    event = request_headers(asked, end_of_stream=True, subset=(str(B),), modes=BUFFERED)
    (answer,) = bench.stream().receive(event, now=1.0)
    assert isinstance(answer, Refuse)
    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["n"]
    event = request_headers(asked, end_of_stream=True, subset=(str(C),), modes=BUFFERED)
    (routed,) = bench.stream().receive(event, now=1.0)
    assert isinstance(routed, Answer), "nothing is known of this server, so the request goes to it"


@pytest.mark.parametrize(
    ("method", "path", "settings", "known"),
    [
        ("DELETE", "/v1/models", StreamSettings(), True),
        ("GET", "/v1/models/m", StreamSettings(), True),
        ("GET", "/v1/models", StreamSettings(answers_list=False), True),
        ("GET", "/v1/models", StreamSettings(), False),
    ],
)
def test_other_requests_and_lists_that_are_not_known_go_to_a_server(
    method: str, path: str, settings: StreamSettings, *, known: bool
) -> None:
    bench = Bench(settings=settings)
    if known:
        listed_by(bench, "m")
    event = request_headers(((":method", method), (":path", path)), end_of_stream=True, modes=BUFFERED)
    (routed,) = bench.stream().receive(event, now=1.0)
    assert isinstance(routed, Answer)


def sent(bench: Bench, body: bytes = BODY, modes: Modes = BUFFERED) -> list[Action]:
    """Send one request. Return what follows its body."""
    stream = bench.stream()
    stream.receive(request_headers(HEADERS, modes=modes), now=1.0)
    return list(stream.receive(request_body(body, end_of_stream=True), now=1.0))


NEW_BODY = BODY.replace(b'"model": "m"', b'"model": "the-target"')


@pytest.mark.parametrize("modes", [BUFFERED, DUPLEX])
def test_an_alias_is_replaced_in_the_body_and_routed_as_its_target(modes: Modes) -> None:
    bench = Bench()
    listed_by(bench, "other", "the-target", "other")
    rewriting(bench, "m")
    actions = sent(bench, modes=modes)
    answer = actions[0]
    assert isinstance(answer, Answer)
    assert dict(answer.set_headers)["content-length"] == str(len(NEW_BODY))
    if modes is BUFFERED:
        assert (answer.body, len(actions)) == (NEW_BODY, 1)
        assert NEW_BODY in encode(answer)
    else:
        echoes = [action for action in actions if isinstance(action, Piece)]
        assert (answer.body, b"".join(echo.data for echo in echoes)) == (None, NEW_BODY)
        assert echoes[-1].end_of_stream
    (pick,) = bench.seen.picks
    assert (pick.decision.model, pick.decision.asked_model, pick.decision.chosen) == ("the-target", "m", "e1")


@pytest.mark.parametrize("model", [b"", b'"model": null, ', b'"model": "", '])
def test_a_request_without_a_model_goes_to_the_default_else_anywhere(model: bytes) -> None:
    bench = Bench()
    listed_by(bench, "other", "the-target", "other")
    body = b'{%s"prompt": "%s"}' % (model, b"p" * 900)
    answer = only(sent(bench, body))
    assert answer.body is None
    rewriting(bench)
    answer = only(sent(bench, body))
    assert json.loads(answer.body or b"") == {"model": "the-target", "prompt": "p" * 900}
    assert bench.seen.picks[-1].decision.chosen == "e1"


def test_no_content_length_is_added_if_none_was_declared() -> None:
    bench = Bench()
    rewriting(bench, "m")
    stream = bench.stream()
    stream.receive(request_headers(((":path", "/v1/completions"),), modes=BUFFERED), now=1.0)
    answer = only(stream.receive(request_body(BODY, end_of_stream=True), now=1.0))
    assert "content-length" not in dict(answer.set_headers)
    assert answer.body == NEW_BODY


def test_nothing_is_renamed_if_the_data_plane_sends_its_own_copy_of_body() -> None:
    bench = Bench()
    rewriting(bench, "m")
    actions = sent(bench, modes=PARTIAL)
    assert all(isinstance(action, Answer) and action.body is None for action in actions)
    (pick,) = bench.seen.picks
    assert (pick.decision.model, pick.decision.asked_model) == ("m", "")


def test_a_prefix_belongs_to_the_target_and_aliases_are_listed() -> None:
    bench = Bench()
    listed_by(bench, "the-target", "the-target", "the-target")
    rewriting(bench, "m")
    for model in ("m", "the-target"):
        body = json.dumps({"model": model, "prompt": "of foxes and hounds " * 1000}).encode()
        sent(bench, body)
    first, second = bench.seen.picks
    matched = {each.name: each.matched_tokens for each in second.decision.candidates}
    assert matched.pop(first.decision.chosen) > 0
    assert set(matched.values()) == {0}
    listed = bench.picker.fleet.served.model_list()
    assert listed is not None
    assert [card["id"] for card in json.loads(listed)["data"]] == ["m", "the-target"]


def test_an_alias_of_a_model_that_nobody_serves_is_not_listed() -> None:
    bench = Bench()
    listed_by(bench, "another", "another", "another")
    rewriting(bench, "m")
    listed = bench.picker.fleet.served.model_list()
    assert listed is not None
    assert [card["id"] for card in json.loads(listed)["data"]] == ["another"]
