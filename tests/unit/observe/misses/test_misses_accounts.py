"""The sums of missed tokens over the last minutes."""

from __future__ import annotations

from epp.base.types import EndpointName
from epp.observe.misses.accounts import CAUSES, EVICTED, NEW, TAIL, Accounts

A, B = EndpointName("a"), EndpointName("b")


def test_all_causes_are_listed_in_order_of_size() -> None:
    accounts = Accounts()
    bucket = accounts.bucket(now=100.0)
    bucket.miss(TAIL, 5)
    bucket.miss(EVICTED, 20, server=A)
    bucket.miss(EVICTED, 30, server=B)
    found = accounts.over(60.0, now=105.0).by_cause()
    assert [(part.cause, part.tokens) for part in found[:2]] == [(EVICTED, 50), (TAIL, 5)]
    assert list(found[0].servers.items()) == [(B, 30), (A, 20)]
    assert {part.cause for part in found} == set(CAUSES)


def test_only_buckets_that_began_within_the_window_count() -> None:
    accounts = Accounts()
    for at in (0.0, 9.0, 10.0, 25.0):
        bucket = accounts.bucket(now=at)
        bucket.request("default", prompt_tokens=10, matched_tokens=4)
        bucket.miss(NEW, 6)
    assert accounts.bucket(now=29.0) is bucket, "a bucket lasts for ten seconds"
    found = accounts.over(20.0, now=30.0)
    assert found.total() == (2, 20, 8)
    assert found.by_cause()[0].tokens == 12
    assert accounts.over(900.0, now=30.0).total().requests == 4
    assert accounts.over(900.0, now=30.0).began_at == 0.0


def test_buckets_older_than_fifteen_minutes_are_dropped() -> None:
    accounts = Accounts()
    for n in range(200):
        accounts.bucket(now=10.0 * n).request("default", prompt_tokens=10, matched_tokens=4)
    assert accounts.over(1e9, now=2000.0).total().requests == 90


def test_beyond_the_bound_tokens_count_without_their_server() -> None:
    accounts = Accounts()
    bucket = accounts.bucket(now=0.0)
    for n in range(2500):
        bucket.miss(EVICTED, 1, server=EndpointName(f"s{n}"))
    bucket.miss(EVICTED, 1, server=EndpointName("s0"))
    part = accounts.over(60.0, now=1.0).by_cause()[0]
    assert part.tokens == 2501
    assert len(part.servers) == 2000
    assert part.servers[EndpointName("s0")] == 2
