"""An endpoint was away for a moment. The tests check which part of its table is used when it is back."""

from __future__ import annotations

import random

import pytest

from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import API_VERSION, DEFAULT_POLICY, KIND, Metadata, Policy, PolicySpec
from epp.config.routing import Chunks
from epp.picker.decision import Question
from epp.picker.picker import Picker
from epp.picker.prefix_index.integrity import check_integrity
from epp.picker.scheduling.snapshot import MOST_KEPT

A = EndpointName("a:8000")


def process_of_a(*, incarnation: str = "uid/1", host: str = "10.0.0.1", model: str = "") -> Endpoint:
    return Endpoint(A, Address(host, 8000), model=model, incarnation=incarnation)


def warm_picker(of: Endpoint) -> tuple[Picker, int]:
    """Return a picker with one endpoint, whose cache is much larger than the default, and the number of its
    entries.
    """
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    picker.news.set_endpoints([of], now=0.0)
    picker.news.observe(A, EndpointMetrics(scraped_at=0.0, capacity_tokens=10**7), now=0.0)
    for n in range(40):
        prompt = random.Random(n).randbytes(20_000).hex().encode()
        inference = InferenceRequest(kind=ApiKind.COMPLETIONS, model="m", prompt=prompt)
        pick = picker.pick(Question("r", inference), now=0.0)
        picker.on_response_headers(pick, status=200, served=None, now=0.0)
    entries = picker.caches.table.mirrors[A].entries
    assert picker.caches.table.mirrors[A].used_bytes > 10**6 > 0 < entries
    return picker, entries


def leave_and_return(of: Endpoint, *, as_: Endpoint, away_s: float = 5.0) -> tuple[Picker, int]:
    """Let the endpoint leave and come back as `as_`. Return the number of its entries."""
    picker, entries = warm_picker(of)
    picker.news.set_endpoints([], now=0.0)
    picker.housekeep(now=away_s)
    picker.news.set_endpoints([as_], now=away_s)
    picker.check_integrity()
    return picker, entries


def test_the_same_process_that_was_not_ready_for_a_moment_is_still_warm() -> None:
    picker, entries = leave_and_return(process_of_a(), as_=process_of_a())
    assert picker.caches.table.mirrors[A].entries == entries
    picker.housekeep(now=1000.0)
    assert picker.caches.table.mirrors[A].entries == entries, "the endpoint is back, so nobody waits for it"


@pytest.mark.parametrize(
    "other",
    [process_of_a(incarnation="uid/2"), process_of_a(host="10.0.0.2"), process_of_a(model="another")],
    ids=["restarted", "moved", "another model"],
)
def test_another_process_of_the_same_name_is_cold(other: Endpoint) -> None:
    picker, _ = leave_and_return(process_of_a(), as_=other)
    assert picker.caches.table.mirrors[A].entries == 0


def test_an_endpoint_that_stays_away_is_forgotten() -> None:
    picker, _ = leave_and_return(process_of_a(), as_=process_of_a(), away_s=60.0)
    assert picker.caches.table.mirrors[A].entries == 0
    picker, _ = warm_picker(process_of_a())
    picker.news.set_endpoints([], now=0.0)
    picker.housekeep(now=60.0)
    assert picker.caches.table.entries == 0
    assert list(picker.caches.table.mirrors) == []


def test_an_endpoint_without_an_incarnation_comes_back_cold() -> None:
    picker, _ = leave_and_return(process_of_a(incarnation=""), as_=process_of_a(incarnation=""))
    assert picker.caches.table.mirrors[A].entries == 0


def test_endpoint_that_left_is_forgotten_if_policy_cuts_chunks_differently() -> None:
    picker, _ = warm_picker(process_of_a())
    picker.news.set_endpoints([], now=0.0)
    spec = PolicySpec(chunks=Chunks(size_bytes=128))
    picker.set_policy(
        Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="p"), spec=spec), now=1.0
    )
    picker.news.set_endpoints([process_of_a()], now=2.0)
    assert picker.caches.table.mirrors[A].entries == 0
    check_integrity(picker.caches.table)


def test_no_more_endpoints_than_a_bound_are_remembered() -> None:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    many = [
        Endpoint(EndpointName(f"e{n}"), Address("10.0.0.1", n), incarnation="uid") for n in range(1, 4100)
    ]
    picker.news.set_endpoints(many, now=0.0)
    picker.news.set_endpoints([], now=1.0)
    assert len(picker.caches.table.mirrors) == MOST_KEPT < len(many)
