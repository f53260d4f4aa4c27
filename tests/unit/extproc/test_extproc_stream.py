"""The state machine of one HTTP request, without any transport: what it answers in each mode, and what it releases."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from epp.decision import Pick
from epp.errors import PickError
from epp.extproc.events import (
    Action,
    Answer,
    BodyMode,
    Echo,
    Event,
    Modes,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Slot,
    StreamProtocolError,
)
from epp.extproc.response import StreamSettings
from epp.extproc.stream import HttpStream
from epp.picker import Picker
from epp.policy import API_VERSION, KIND, Cost, Load, Metadata, Policy, PolicySpec, Sampling
from epp.types import Address, Endpoint, EndpointName

BODY = json.dumps({"model": "m", "prompt": "tell me about foxes " * 40}).encode()
HEADERS = (
    (":method", "POST"),
    (":path", "/v1/completions"),
    ("content-length", str(len(BODY))),
    ("x-request-id", "r1"),
)
OK = ((":status", "200"), ("content-type", "text/event-stream"))
KEY = "x-gateway-destination-endpoint"
A, B, C = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000), Address("fd00::1", 8000)

BUFFERED = Modes(BodyMode.BUFFERED)
PARTIAL = Modes(BodyMode.BUFFERED_PARTIAL)
STREAMED = Modes(BodyMode.STREAMED, BodyMode.STREAMED)
EARLY = Modes(BodyMode.STREAMED, early_body=True)
DUPLEX = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
GRPC = Modes(BodyMode.GRPC, BodyMode.GRPC)
NONE = Modes()
ALL = [BUFFERED, PARTIAL, STREAMED, EARLY, DUPLEX, GRPC, NONE]


@dataclass
class Seen:
    picks: list[Pick] = field(default_factory=list)
    over: list[Pick] = field(default_factory=list)
    mismatches: list[bool] = field(default_factory=list)
    refusals: list[tuple[str, PickError]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    parsed_bytes: list[int] = field(default_factory=list)

    def parsed(self, *, seconds: float, size_bytes: int) -> None:
        self.parsed_bytes.append(size_bytes)

    def picked(self, pick: Pick, *, seconds: float) -> None:
        self.picks.append(pick)

    def refused(self, request_id: str, error: PickError) -> None:
        self.refusals.append((request_id, error))

    def responded(self, pick: Pick, *, mismatch: bool) -> None:
        self.mismatches.append(mismatch)

    def ended(self, pick: Pick) -> None:
        self.over.append(pick)

    def protocol_error(self, reason: str) -> None:
        self.faults.append(reason)


class Bench:
    """A picker with three endpoints, and streams on it."""

    def __init__(self, *, settings: StreamSettings | None = None, **spec: object) -> None:
        self.settings = settings or StreamSettings()
        policy = Policy(
            api_version=API_VERSION,
            kind=KIND,
            metadata=Metadata(name="t"),
            spec=PolicySpec(**{"sampling": Sampling(share=0), **spec}),  # type: ignore[arg-type]  # any field of it
        )
        self.picker = Picker(policy, rng=random.Random(3))
        self.set_endpoints(A, B, C)
        self.seen = Seen()

    def set_endpoints(self, *addresses: Address) -> None:
        self.picker.set_endpoints(
            [Endpoint(name=EndpointName(f"e{i}"), address=a) for i, a in enumerate(addresses)], now=0.0
        )

    def stream(self) -> HttpStream:
        return HttpStream(
            self.picker,
            self.seen,
            settings=self.settings,
            new_request_id=lambda: "made",
            timer=lambda: 0.0,
        )

    def in_flight(self) -> int:
        return sum(s.in_flight for s in self.picker.fleet.states())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def run(stream: HttpStream, *events: Event) -> list[Action]:
    actions: list[Action] = []
    for i, event in enumerate(events):
        actions += stream.receive(event, now=1.0 + i)
        stream.check_integrity()
    return actions


def head(modes: Modes | None, *extra: tuple[str, str], end: bool = False) -> RequestHeaders:
    return RequestHeaders((*HEADERS, *extra), end_of_stream=end, modes=modes)


def routed(actions: Sequence[Action]) -> list[Answer]:
    return [a for a in actions if isinstance(a, Answer) and a.destination]


def slots(actions: Sequence[Action]) -> list[Slot]:
    return [a.slot for a in actions if isinstance(a, Answer | Echo)]


def echoed(actions: Sequence[Action]) -> bytes:
    return b"".join(bytes(a.data) for a in actions if isinstance(a, Echo))


def refused(actions: Sequence[Action]) -> Refuse:
    assert len(actions) == 1
    assert isinstance(actions[0], Refuse)
    return actions[0]


# -- the order of answers in each mode ----------------------------------------------------------------------------------

H, D, T = Slot.REQUEST_HEADERS, Slot.REQUEST_BODY, Slot.REQUEST_TRAILERS


@pytest.mark.parametrize(
    ("modes", "expected", "destination_in", "kind"),
    [
        (BUFFERED, [H, D], D, "completions"),
        (PARTIAL, [H, D], D, "completions"),
        (STREAMED, [H, D], H, "other"),
        (EARLY, [H, D], H, "completions"),
        (DUPLEX, [H, D], H, "completions"),
        (GRPC, [H, D], H, "completions"),
        (NONE, [H], H, "other"),
    ],
)
def test_each_mode_gets_its_answers_in_order_with_the_pick_in_one_of_them(
    bench: Bench, modes: Modes, expected: list[Slot], destination_in: Slot, kind: str
) -> None:
    stream = bench.stream()
    body = [] if modes is NONE else [RequestBody(BODY, end_of_stream=True)]
    actions = run(stream, head(modes), *body)
    assert slots(actions) == expected
    (answer,) = routed(actions)
    assert answer.slot is destination_in
    assert answer.set_headers == ((KEY, answer.destination),)
    assert sorted(answer.destination.split(",")) == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
    assert bench.seen.picks[0].decision.kind == kind
    assert echoed(actions) == (BODY if modes in (DUPLEX, GRPC) else b"")


@pytest.mark.parametrize("modes", [BUFFERED, PARTIAL, STREAMED, NONE])
def test_headers_are_answered_at_once_where_the_data_plane_waits_for_it(bench: Bench, modes: Modes) -> None:
    assert slots(run(bench.stream(), head(modes))) == [H]


@pytest.mark.parametrize("modes", [EARLY, DUPLEX, GRPC])
def test_headers_wait_for_the_body_where_it_comes_by_itself(bench: Bench, modes: Modes) -> None:
    stream = bench.stream()
    assert run(stream, head(modes), RequestBody(BODY[:100])) == []
    assert slots(run(stream, RequestBody(BODY[100:], end_of_stream=True)))[0] is H


def test_a_silent_data_plane_is_taken_to_speak_full_duplex(bench: Bench) -> None:
    actions = run(bench.stream(), head(None), RequestBody(BODY, end_of_stream=True))
    assert slots(actions) == [H, D]
    assert echoed(actions) == BODY


def test_what_a_silent_data_plane_speaks_can_be_configured() -> None:
    bench = Bench(settings=StreamSettings(assumed_modes=BUFFERED))
    actions = run(bench.stream(), head(None), RequestBody(BODY, end_of_stream=True))
    assert slots(actions) == [H, D]
    assert echoed(actions) == b""


@pytest.mark.parametrize("size_bytes", [0, 1, 61_999, 62_000, 62_001, 124_000, 400_000])
@pytest.mark.parametrize("ends_in_trailers", [False, True])
def test_full_duplex_echoes_in_pieces_within_the_limit(
    bench: Bench, *, size_bytes: int, ends_in_trailers: bool
) -> None:
    body = random.Random(size_bytes).randbytes(size_bytes)
    stream = bench.stream()
    first = RequestHeaders(((":path", "/upload"),), modes=DUPLEX)
    if ends_in_trailers:
        actions = run(stream, first, RequestBody(body), RequestTrailers())
    else:
        actions = run(stream, first, RequestBody(body, end_of_stream=True))
    assert slots(actions)[0] is H
    pieces = [a for a in actions if isinstance(a, Echo)]
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
    event = RequestHeaders(((":method", method), (":path", "/v1/models")), end_of_stream=True, modes=modes)
    (answer,) = run(bench.stream(), event)
    assert isinstance(answer, Answer)
    assert answer.slot is H
    assert answer.destination
    assert bench.seen.picks[0].decision.kind == "other"


def test_each_chunk_of_a_streamed_body_is_answered_unread(bench: Bench) -> None:
    chunks = [
        RequestBody(BODY[i : i + 50], end_of_stream=i + 50 >= len(BODY)) for i in range(0, len(BODY), 50)
    ]
    actions = run(bench.stream(), head(STREAMED), *chunks)
    assert slots(actions) == [H] + [D] * len(chunks)
    assert bench.seen.parsed_bytes == []


def test_an_early_body_is_held_only_up_to_the_limit() -> None:
    bench = Bench(settings=StreamSettings(streamed_hold_bytes=500))
    stream = bench.stream()
    assert run(stream, head(EARLY), RequestBody(BODY[:499])) == []
    actions = run(stream, RequestBody(BODY[499:600]))
    assert slots(actions) == [H, D, D]
    assert bench.seen.picks[0].decision.kind == "other"
    assert slots(run(stream, RequestBody(BODY[600:], end_of_stream=True))) == [D]


def test_an_early_body_is_whole_when_its_declared_length_is_here(bench: Bench) -> None:
    stream = bench.stream()
    assert run(stream, head(EARLY), RequestBody(BODY[:10])) == []
    assert slots(run(stream, RequestBody(BODY[10:]))) == [H, D, D]
    assert bench.seen.picks[0].decision.kind == "completions"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", BODY + b"\n", "completions"),
        ("/upload", b"--boundary", "other"),
        ("/upload", b'{"a": 1}', "other"),
    ],
)
def test_an_early_body_of_unknown_length_is_whole_when_its_json_is(
    bench: Bench, path: str, body: bytes, kind: str
) -> None:
    stream = bench.stream()
    run(stream, RequestHeaders(((":path", path),), modes=EARLY))
    assert slots(run(stream, RequestBody(body))) == [H, D]
    assert bench.seen.picks[0].decision.kind == kind


def test_a_buffered_body_without_bytes_before_trailers_is_routed_by_metadata(bench: Bench) -> None:
    actions = run(bench.stream(), head(BUFFERED), RequestTrailers())
    assert slots(actions) == [H, T]
    (answer,) = routed(actions)
    assert answer.slot is T
    assert answer.set_headers == ()


def test_trailers_after_a_buffered_body_pass(bench: Bench) -> None:
    actions = run(bench.stream(), head(BUFFERED), RequestBody(BODY), RequestTrailers())
    assert slots(actions) == [H, D, T]
    assert len(routed(actions)) == 1


# -- what decides the pick ----------------------------------------------------------------------------------------------


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


def test_a_compressed_body_is_routed_by_load(bench: Bench) -> None:
    event = RequestHeaders(((":path", "/v1/completions"), ("Content-Encoding", "gzip")), modes=BUFFERED)
    run(bench.stream(), event, RequestBody(b"\x1f\x8b\x08", end_of_stream=True))
    assert bench.seen.picks[0].decision.kind == "other"


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
def test_a_subset_hint_that_allows_nothing_gets_503(
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
    assert first.remove_headers == (KEY,) or first.set_headers[0][0] == KEY
    assert "6.6.6.6" not in repr(actions)


def test_names_match_in_any_case_and_the_first_request_id_is_kept(bench: Bench) -> None:
    event = RequestHeaders(
        ((":PATH", "/v1/completions"), ("X-Request-ID", "Mine")), end_of_stream=True, modes=BUFFERED
    )
    (answer,) = run(bench.stream(), event)
    assert isinstance(answer, Answer)
    assert bench.seen.picks[0].decision.request_id == "Mine"
    assert [name for name, _ in answer.set_headers] == [KEY]


def test_a_request_id_is_made_where_none_came(bench: Bench) -> None:
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
def test_a_conformance_run_prescribes_the_pick(wish: str, expected: tuple[Address, ...]) -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    run(bench.stream(), head(NONE, ("test-epp-endpoint-selection", wish)))
    assert bench.seen.picks[0].destinations[: len(expected)] == expected


def test_a_prescription_of_nothing_that_exists_gets_503() -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    actions = run(bench.stream(), head(NONE, ("test-epp-endpoint-selection", "1.1.1.1")))
    assert refused(actions).status == 503


def test_without_the_flag_clients_prescribe_nothing() -> None:
    bench = Bench(rule="round-robin")
    for _ in range(3):
        run(bench.stream(), head(NONE, ("test-epp-endpoint-selection", "10.0.0.2:8000")))
    assert {p.destinations[0] for p in bench.seen.picks} == {A, B, C}


def test_scores_are_told_where_configured() -> None:
    bench = Bench(settings=StreamSettings(scores_metadata=True))
    (answer,) = routed(run(bench.stream(), head(NONE)))
    assert {address for address, _ in answer.scores} == {str(A), str(B), str(C)}


# -- refusals -----------------------------------------------------------------------------------------------------------


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


# -- the response -------------------------------------------------------------------------------------------------------


def through(bench: Bench, modes: Modes = BUFFERED, *extra: tuple[str, str]) -> HttpStream:
    """A stream whose request has been routed."""
    stream = bench.stream()
    run(stream, head(modes, *extra), *([] if modes is NONE else [RequestBody(BODY, end_of_stream=True)]))
    assert bench.in_flight() > 0
    return stream


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
def test_closing_releases_the_booking_with_what_became_of_the_request(
    bench: Bench, events: list[Event], outcome: str
) -> None:
    stream = through(bench)
    run(stream, *events)
    stream.close(now=9.0)
    stream.close(now=9.5)
    assert bench.in_flight() == 0
    assert [p.decision.outcome for p in bench.seen.over] == [outcome]


def test_a_picker_that_breaks_tells_it(bench: Bench) -> None:
    stream = through(bench)
    stream.close(now=9.0, broken=True)
    assert bench.seen.over[0].decision.outcome == "failed"


def test_who_served_moves_the_booking(bench: Bench) -> None:
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


@pytest.mark.parametrize(
    ("modes", "override"),
    [
        (BUFFERED, True),
        (PARTIAL, True),
        (NONE, True),
        (EARLY, False),
        (Modes(BodyMode.FULL_DUPLEX_STREAMED), False),
        (STREAMED, False),
        (DUPLEX, False),
    ],
)
def test_a_sampled_answer_is_asked_for_where_the_data_plane_grants_it(
    *, modes: Modes, override: bool
) -> None:
    bench = Bench(sampling=Sampling(share=1))
    (answer,) = run(through(bench, modes), ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert answer.stream_response is override


@pytest.mark.parametrize("headers", [((":status", "500"),), ((":status", "404"),)])
def test_only_good_answers_are_sampled(headers: tuple[tuple[str, str], ...]) -> None:
    bench = Bench(sampling=Sampling(share=1))
    assert run(through(bench), ResponseHeaders(headers)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_nothing_is_asked_for_where_the_gateway_forbids_it() -> None:
    bench = Bench(settings=StreamSettings(mode_override=False), sampling=Sampling(share=1))
    assert run(through(bench), ResponseHeaders(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


@pytest.mark.parametrize("modes", [BUFFERED, STREAMED, DUPLEX])
def test_a_sampled_answer_teaches_and_goes_on_unchanged(modes: Modes) -> None:
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
    if modes is not STREAMED:  # There the request's body was not read, so its answer's API is unknown.
        assert bench.seen.picks[0].decision.cached_tokens == 4
    stream.close(now=99.0)
    assert bench.seen.over[0].decision.outcome == "ended"


def test_a_sampled_answer_that_is_cut_counts_as_aborted() -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench)
    run(stream, ResponseHeaders(OK), ResponseBody(b"data: x\n\n"))
    stream.close(now=9.0)
    assert bench.seen.over[0].decision.outcome == "aborted"


def test_the_debug_header_gets_the_decision_where_the_policy_allows() -> None:
    bench = Bench(debug_header="x-why")
    (answer,) = run(through(bench, BUFFERED, ("X-Why", "1")), ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert dict(answer.set_headers)["x-prefix-gateway-decision"] == bench.seen.picks[0].explanation
    assert run(through(bench), ResponseHeaders(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_without_a_debug_header_in_the_policy_nobody_gets_it(bench: Bench) -> None:
    assert run(through(bench, BUFFERED, ("", "1")), ResponseHeaders(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_a_conformance_run_is_told_who_served() -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    (answer,) = run(through(bench), ResponseHeaders(OK, served="10.0.0.1:8000"))
    assert isinstance(answer, Answer)
    assert answer.set_headers == (("x-conformance-test-served-endpoint", "10.0.0.1:8000"),)


# -- letting go ---------------------------------------------------------------------------------------------------------


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


def test_a_sampled_stream_may_be_let_go_at_a_drain_since_the_data_plane_goes_on_alone() -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench)
    (answer,) = run(stream, ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert answer.stream_response
    assert stream.hold
    assert stream.can_detach


def test_a_stream_that_does_not_stay_asks_for_no_answer() -> None:
    bench = Bench(settings=StreamSettings(hold_streams=False), sampling=Sampling(share=1))
    stream = through(bench)
    (answer,) = run(stream, ResponseHeaders(OK))
    assert isinstance(answer, Answer)
    assert not answer.stream_response
    assert stream.can_detach


def test_a_full_duplex_request_that_is_still_coming_keeps_its_stream(bench: Bench) -> None:
    stream = bench.stream()
    run(stream, head(DUPLEX), RequestBody(BODY[:9]), ResponseHeaders(OK, end_of_stream=True))
    assert not stream.can_detach


def test_letting_go_leaves_the_load_to_the_scrapes(bench: Bench) -> None:
    stream = through(bench)
    run(stream, ResponseHeaders(OK))
    stream.detach(now=5.0)
    stream.close(now=6.0)
    assert [p.decision.outcome for p in bench.seen.over] == ["detached"]


# -- odd peers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([head(BUFFERED), head(BUFFERED)], "second_request_headers"),
        ([head(NONE), ResponseHeaders(OK), ResponseHeaders(OK)], "second_response_headers"),
    ],
)
def test_what_cannot_be_is_a_typed_error(bench: Bench, events: list[Event], reason: str) -> None:
    stream = bench.stream()
    run(stream, *events[:-1])
    with pytest.raises(StreamProtocolError, match=reason):
        stream.receive(events[-1], now=5.0)


def test_nothing_follows_the_end(bench: Bench) -> None:
    stream = bench.stream()
    stream.close(now=1.0)
    with pytest.raises(StreamProtocolError, match="event_after_end"):
        stream.receive(head(NONE), now=2.0)
    assert bench.in_flight() == 0


def test_a_body_without_headers_passes_and_is_reported(bench: Bench) -> None:
    actions = run(bench.stream(), RequestBody(b"abc", end_of_stream=True, modes=BUFFERED))
    assert actions == [Answer(D)]
    assert bench.seen.faults == ["body_before_headers"]


@pytest.mark.parametrize("modes", ALL)
def test_a_response_before_the_pick_ends_the_need_for_one(bench: Bench, modes: Modes) -> None:
    stream = bench.stream()
    early = ResponseHeaders(((":status", "413"),), modes=modes)
    actions = run(stream, early, head(None, (KEY, "6.6.6.6:1")), RequestBody(BODY, end_of_stream=True))
    assert routed(actions) == []
    assert bench.in_flight() == 0
    assert not any(isinstance(a, Refuse) for a in actions)


def test_a_response_while_the_body_is_held_still_lets_the_body_pass(bench: Bench) -> None:
    stream = bench.stream()
    run(stream, head(DUPLEX), RequestBody(BODY[:9]), ResponseHeaders(((":status", "408"),)))
    actions = run(stream, RequestBody(BODY[9:], end_of_stream=True))
    assert slots(actions) == [H, D]
    assert echoed(actions) == BODY
    assert routed(actions) == []
