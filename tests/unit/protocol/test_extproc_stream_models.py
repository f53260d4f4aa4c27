"""Models in one stream: the gateway itself answers the list of models, and a model that no server has is
refused.
"""

from __future__ import annotations

import json

import pytest

from epp.base.types import EndpointName, ModelCard, ModelList
from epp.protocol.asking import StreamSettings
from epp.protocol.codec import encode
from epp.protocol.http_events import (
    Answer,
    Echo,
    Modes,
    Refuse,
    RequestBody,
    RequestHeaders,
)
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
    rewriting,
)


def listed_by(bench: Bench, *names: str) -> None:
    """Let the first servers of the bench list these models, one each."""
    lists = {EndpointName(f"e{n}"): ModelList((ModelCard(name),)) for n, name in enumerate(names)}
    bench.picker.take_lists(lists, now=0.0)


@pytest.mark.parametrize("modes", [*ALL, None])
def test_the_list_of_models_is_answered_from_what_the_servers_list(modes: Modes | None) -> None:
    bench = Bench()
    listed_by(bench, "m", "n")
    for path in ("/v1/models", "/v1/models/?limit=20", "/prefix/v1/models"):
        event = RequestHeaders(((":method", "GET"), (":path", path)), end_of_stream=True, modes=modes)
        (answer,) = bench.stream().receive(event, now=1.0)
        assert isinstance(answer, Refuse)
        assert (answer.status, answer.reason) == (200, "model_list")
        assert [card["id"] for card in json.loads(answer.body)["data"]] == ["m", "n"]
    assert bench.in_flight() == 0


def test_the_list_of_models_is_that_of_the_subset_if_there_is_one() -> None:
    bench = Bench()
    listed_by(bench, "m", "n")
    asked = ((":method", "GET"), (":path", "/v1/models"))
    event = RequestHeaders(asked, end_of_stream=True, subset=(str(B),), modes=BUFFERED)
    (answer,) = bench.stream().receive(event, now=1.0)
    assert isinstance(answer, Refuse)
    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["n"]
    event = RequestHeaders(asked, end_of_stream=True, subset=(str(C),), modes=BUFFERED)
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
    event = RequestHeaders(((":method", method), (":path", path)), end_of_stream=True, modes=BUFFERED)
    (routed,) = bench.stream().receive(event, now=1.0)
    assert isinstance(routed, Answer)


@pytest.mark.parametrize(
    ("path", "told"),
    [("/v1/completions", {"code": "model_not_found"}), ("/v1/messages", {"type": "not_found_error"})],
)
def test_an_unknown_model_is_404_in_the_shape_of_its_api(path: str, told: dict[str, str]) -> None:
    bench = Bench()
    listed_by(bench, "m", "n", "n")
    body = {"model": "ghost", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    stream = bench.stream()
    stream.receive(RequestHeaders(((":path", path),), modes=BUFFERED), now=1.0)
    (answer,) = stream.receive(RequestBody(json.dumps(body).encode(), end_of_stream=True), now=1.0)
    assert isinstance(answer, Refuse)
    assert answer.status == 404
    error = json.loads(answer.body)["error"]
    assert "ghost" in error["message"]
    assert error | told == error


NEW_BODY = BODY.replace(b'"model": "m"', b'"model": "the-target"')


@pytest.mark.parametrize("modes", [BUFFERED, DUPLEX])
def test_an_alias_is_replaced_in_the_body_and_routed_as_its_target(modes: Modes) -> None:
    bench = Bench()
    listed_by(bench, "other", "the-target", "other")
    rewriting(bench, "m")
    stream = bench.stream()
    stream.receive(RequestHeaders(HEADERS, modes=modes), now=1.0)
    actions = stream.receive(RequestBody(BODY, end_of_stream=True), now=1.0)
    answer = actions[0]
    assert isinstance(answer, Answer)
    assert dict(answer.set_headers)["content-length"] == str(len(NEW_BODY))
    if modes is BUFFERED:
        assert (answer.body, len(actions)) == (NEW_BODY, 1)
        assert NEW_BODY in encode(answer)
    else:
        echoes = [action for action in actions if isinstance(action, Echo)]
        assert (answer.body, b"".join(echo.data for echo in echoes)) == (None, NEW_BODY)
        assert echoes[-1].end_of_stream
    (pick,) = bench.seen.picks
    assert (pick.decision.model, pick.decision.asked_model, pick.decision.chosen) == ("the-target", "m", "e1")


@pytest.mark.parametrize("model", [b"", b'"model": null, ', b'"model": "", '])
def test_a_request_without_a_model_goes_to_the_default_else_anywhere(model: bytes) -> None:
    bench = Bench()
    listed_by(bench, "other", "the-target", "other")
    body = b'{%s"prompt": "%s"}' % (model, b"p" * 900)
    anywhere = bench.stream()
    anywhere.receive(RequestHeaders(HEADERS, modes=BUFFERED), now=1.0)
    (answer,) = anywhere.receive(RequestBody(body, end_of_stream=True), now=1.0)
    assert isinstance(answer, Answer)
    assert answer.body is None
    rewriting(bench)
    stream = bench.stream()
    stream.receive(RequestHeaders(HEADERS, modes=BUFFERED), now=1.0)
    (answer,) = stream.receive(RequestBody(body, end_of_stream=True), now=1.0)
    assert isinstance(answer, Answer)
    assert json.loads(answer.body or b"") == {"model": "the-target", "prompt": "p" * 900}
    assert bench.seen.picks[-1].decision.chosen == "e1"


def test_no_content_length_is_added_if_none_was_declared() -> None:
    bench = Bench()
    rewriting(bench, "m")
    stream = bench.stream()
    stream.receive(RequestHeaders(((":path", "/v1/completions"),), modes=BUFFERED), now=1.0)
    (answer,) = stream.receive(RequestBody(BODY, end_of_stream=True), now=1.0)
    assert isinstance(answer, Answer)
    assert "content-length" not in dict(answer.set_headers)
    assert answer.body == NEW_BODY


def test_nothing_is_renamed_if_the_data_plane_sends_its_own_copy_of_body() -> None:
    bench = Bench()
    rewriting(bench, "m")
    stream = bench.stream()
    stream.receive(RequestHeaders(HEADERS, modes=PARTIAL), now=1.0)
    actions = stream.receive(RequestBody(BODY, end_of_stream=True), now=1.0)
    assert all(isinstance(action, Answer) and action.body is None for action in actions)
    (pick,) = bench.seen.picks
    assert (pick.decision.model, pick.decision.asked_model) == ("m", "")


def test_a_prefix_belongs_to_the_target_and_aliases_are_listed() -> None:
    bench = Bench()
    listed_by(bench, "the-target", "the-target", "the-target")
    rewriting(bench, "m")
    for model in ("m", "the-target"):
        body = json.dumps({"model": model, "prompt": "of foxes and hounds " * 1000}).encode()
        stream = bench.stream()
        stream.receive(RequestHeaders(HEADERS, modes=BUFFERED), now=1.0)
        stream.receive(RequestBody(body, end_of_stream=True), now=1.0)
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
