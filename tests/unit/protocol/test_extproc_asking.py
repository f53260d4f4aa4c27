"""The question to the picker, and what its answer to the data plane sets, removes and reports."""

import json
import tracemalloc

import pytest

from epp.base.types import SERVER_HEADERS, Address, Endpoint, EndpointName
from epp.config.dialects import Dialect
from epp.protocol.header_names import read_address, read_addresses, read_prescribed
from epp.protocol.http_events import Answer, Headers, Modes, Slot
from epp.protocol.settings import StreamSettings
from tests.invariants.protocol import check_stream
from tests.unit.protocol.stream_bench import (
    ALL,
    BODY,
    BUFFERED,
    DUPLEX,
    HEADERS,
    KEY,
    NONE,
    OK,
    PARTIAL,
    STREAMED,
    A,
    B,
    Bench,
    C,
    head,
    only,
    refused,
    request_body,
    request_headers,
    response_headers,
    routed,
    run,
    slots,
    whole,
)


@pytest.mark.parametrize("modes", [NONE, STREAMED])
def test_an_unread_body_still_counts_as_work_of_its_declared_length(bench: Bench, modes: Modes) -> None:
    sizes = []
    for length in ("4000", "8000"):
        run(bench.stream(), request_headers(((":path", "/x"), ("content-length", length)), modes=modes))
        sizes.append(bench.seen.picks[-1].decision.prompt_tokens)
    assert sizes[1] == 2 * sizes[0] > 0


def test_a_body_that_was_cut_is_routed_by_load_for_its_model(bench: Bench) -> None:
    actions = run(bench.stream(), head(PARTIAL), request_body(BODY[:200], end_of_stream=False))
    assert len(routed(actions)) == 1
    decision = bench.seen.picks[0].decision
    assert (decision.kind, decision.model, decision.unread) == ("completions", "m", "partial_body")


def test_a_compressed_body_is_routed_by_load(bench: Bench) -> None:
    event = request_headers(((":path", "/v1/completions"), ("Content-Encoding", "gzip")), modes=BUFFERED)
    run(bench.stream(), event, request_body(b"\x1f\x8b\x08", end_of_stream=True))
    assert bench.seen.picks[0].decision.kind == "other"
    assert bench.seen.picks[0].decision.unread == "encoded_body"


@pytest.mark.parametrize("modes", ALL)
@pytest.mark.parametrize("name", [KEY, KEY.title(), *SERVER_HEADERS, "X-Prefiller-Host-Port"])
def test_headers_that_route_and_that_servers_obey_are_taken_from_clients(
    bench: Bench, modes: Modes, name: str
) -> None:
    actions = run(bench.stream(), *whole(modes, (name, "6.6.6.6:1")))
    first = next(a for a in actions if isinstance(a, Answer))
    set_anew = name.lower() == KEY and bool(first.set_headers) and first.set_headers[0][0] == KEY
    assert name.lower() in first.remove_headers or set_anew
    assert "6.6.6.6" not in repr(actions)


def test_names_match_in_any_case_and_the_first_request_id_is_kept(bench: Bench) -> None:
    event = request_headers(
        ((":PATH", "/v1/completions"), ("X-Request-ID", "Mine")), end_of_stream=True, modes=BUFFERED
    )
    answer = only(run(bench.stream(), event))
    assert bench.seen.picks[0].decision.request_id == "Mine"
    assert [name for name, _ in answer.set_headers] == [KEY]


def test_a_request_without_an_id_gets_one(bench: Bench) -> None:
    answer = only(run(bench.stream(), request_headers(((":path", "/"),), end_of_stream=True, modes=BUFFERED)))
    assert ("x-request-id", "made") in answer.set_headers
    assert bench.seen.picks[0].decision.request_id == "made"


def test_the_session_header_of_the_policy_reaches_the_rule() -> None:
    bench = Bench(rule="session", session_header="x-who")
    chosen = set()
    for _ in range(8):
        run(bench.stream(), head(NONE, ("X-Who", "ann")))
        chosen.add(bench.seen.picks[-1].destinations[0])
    assert len(chosen) == 1


def test_a_body_that_would_take_too_long_is_routed_by_load_and_model(bench: Bench) -> None:
    body = b'{"model":"sql","prompt":[' + b"[]," * 200_000 + b"[]]}"
    endpoints = [
        Endpoint(name=EndpointName("a"), address=A, model="chat"),
        Endpoint(name=EndpointName("b"), address=B, model="sql"),
    ]
    bench.picker.news.set_endpoints(endpoints, now=0.0)
    [answer] = routed(run(bench.stream(), head(BUFFERED), request_body(body, end_of_stream=True)))
    decision = bench.seen.picks[0].decision
    assert (decision.unread, decision.kind, decision.prompt_chunks) == ("costly_body", "completions", 0)
    assert answer.destination == str(B)
    assert "unread=costly_body" in bench.seen.picks[0].explanation


@pytest.mark.parametrize("modes", [NONE, STREAMED])
def test_a_body_that_comes_after_the_pick_is_recorded_as_unread(bench: Bench, modes: Modes) -> None:
    run(bench.stream(), head(modes))
    run(bench.stream(), head(modes, end=True))
    assert [pick.decision.unread for pick in bench.seen.picks] == ["body_not_seen", ""]


LONG = json.dumps({"model": "m", "prompt": "tell me about foxes " * 4000}).encode()
BARE = request_headers((("content-type", "application/json"),))


def test_without_a_path_and_a_mode_the_pick_is_one_address(bench: Bench) -> None:
    actions = run(bench.stream(), BARE, request_body(BODY, end_of_stream=True))
    assert slots(actions) == [Slot.REQUEST_HEADERS], "the picker echoes no body, because nobody waits for it"
    (answer,) = routed(actions)
    assert "," not in answer.destination
    assert bench.seen.picks[0].decision.kind == "completions", "the fields of the body show which API it is"


def test_clean_close_after_the_pick_is_no_abort_if_only_pick_was_asked_for(bench: Bench) -> None:
    stream, body = bench.stream(), request_body(LONG, end_of_stream=True)
    run(stream, BARE, body)
    stream.half_close(now=4.0)
    check_stream(stream)
    assert bench.seen.over[0].decision.outcome == "detached"
    assert bench.in_flight() == 0, "the booking has ended, and from here on scrapes show the load"
    later = bench.stream()
    for event in (BARE, body):
        later.receive(event, now=1000.0)
    first, second = (pick.decision for pick in bench.seen.picks)
    assert second.chosen == first.chosen
    assert second.matched_tokens > 0, "the table keeps the prompt, because the server computes it"


@pytest.mark.parametrize(
    ("first", "answered", "cut", "body_only", "outcome"),
    [
        (BARE, False, True, False, "aborted"),
        (head(None), False, False, True, "detached"),
        (head(BUFFERED), False, False, False, "aborted"),
        (head(BUFFERED), True, False, False, "ended"),
    ],
    ids=[
        "cut",
        "clean, where no answer is shown",
        "clean, as when a client leaves",
        "clean, after the answer",
    ],
)
def test_the_close_of_a_stream_says_how_its_request_ended(
    first: Headers, outcome: str, *, answered: bool, cut: bool, body_only: bool
) -> None:
    bench = Bench(settings=StreamSettings(caller=Dialect(body_only=body_only)))
    stream = bench.stream()
    run(stream, first, request_body(BODY, end_of_stream=True), *([response_headers(OK)] if answered else []))
    if cut:
        stream.close(now=4.0)
    else:
        stream.half_close(now=4.0)
    assert bench.seen.over[0].decision.outcome == outcome


@pytest.mark.parametrize("modes", ALL)
def test_a_gateway_that_reads_one_address_gets_one_in_every_mode(modes: Modes) -> None:
    bench = Bench(settings=StreamSettings(caller=Dialect()))
    (answer,) = routed(run(bench.stream(), *whole(modes)))
    assert "," not in answer.destination
    assert bench.seen.picks[0].decision.destinations == bench.seen.picks[0].destinations[:1]


def test_the_policy_may_ask_for_fewer_than_the_gateway_can_read() -> None:
    bench = Bench(settings=StreamSettings(), max_destinations=2)
    (answer,) = routed(run(bench.stream(), head(BUFFERED), request_body(BODY, end_of_stream=True)))
    assert len(answer.destination.split(",")) == 2


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
    _, *body = whole(modes)
    run(bench.stream(), request_headers(HEADERS, subset=hint, modes=modes), *body)
    assert set(bench.seen.picks[0].destinations) == allowed


@pytest.mark.parametrize(
    "hint", [(), ("",), ("nonsense",), ("10.0.0.1",), ("10.0.0.1:9",), ("fd00::1:8000",)]
)
@pytest.mark.parametrize("end", [False, True])
def test_a_subset_hint_that_allows_no_endpoint_gets_503(
    bench: Bench, *, hint: tuple[str, ...], end: bool
) -> None:
    stream = bench.stream()
    actions = run(stream, request_headers(HEADERS, end_of_stream=end, subset=hint, modes=DUPLEX))
    actions += [] if end else run(stream, request_body(BODY, end_of_stream=True))
    assert refused(actions).status == 503
    assert refused(actions).reason == "subset_empty"


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


def test_text_that_is_too_long_for_an_address_is_refused_and_not_kept() -> None:
    tracemalloc.start()
    for n in range(3):
        assert read_address(str(n) * 1_000_000) is None
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 100_000
    assert read_address("10.0.0.1:8000" + " " * 100) is None
    assert read_address("[fd00::2]:65535") == Address("fd00::2", 65535)


def test_a_hint_and_a_test_header_name_a_bounded_number_of_addresses() -> None:
    addresses = [f"10.{n // 250}.{n % 250}.1:8000" for n in range(10_000)]
    first = frozenset(map(Address.parse, addresses[:4_096]))
    assert read_addresses(addresses) == read_addresses([",".join(addresses)]) == first
    endpoints = Bench().picker.news.endpoints()
    assert read_prescribed("," * 63 + str(A), endpoints) == (A,)
    assert read_prescribed("," * 64 + str(A), endpoints) == ()
