"""Addresses in headers and hints, and the endpoints that a conformance test prescribes."""

from __future__ import annotations

import tracemalloc

import pytest

from epp.base.types import Address
from epp.protocol.asking import StreamSettings
from epp.protocol.header_names import read_address, read_addresses, read_prescribed
from epp.protocol.http_events import Modes, RequestBody, RequestHeaders
from tests.unit.protocol.stream_bench import (
    ALL,
    BODY,
    DUPLEX,
    HEADERS,
    NONE,
    A,
    B,
    Bench,
    C,
    head,
    refused,
    run,
)


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
