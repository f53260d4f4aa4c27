"""How the assumed size of a cache follows what the server's counters say of the predictions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.learned import CacheSize
from epp.endpoints.state import HitWindow

SPAN = 32.0


class Server:
    """A server's counters, and the picker's estimate of the server."""

    def __init__(self, size: CacheSize) -> None:
        self.size = size
        self.window = HitWindow()
        self.hits = 0.0
        self.now = 0.0
        self.scrape()

    def request(self, *, unused_s: float, predicted: int = 1000, hit: float = 1000.0) -> None:
        self.window.predicted(self.size.staleness, tokens=predicted, others=100, unused_s=unused_s)
        self.hits += hit

    def scrape(self, *, after_s: float = 6.0, waiting: int = 0, bounded: bool = True) -> None:
        self.now += after_s
        self.size.observe(
            self.window,
            hits=self.hits,
            waiting=waiting,
            bounded=bounded,
            span=SPAN,
            now=self.now,
        )


def traffic(
    size: CacheSize, *, requests: int, kept_s: float, scale: float = 1.0, bounded: bool = True, seed: int = 1
) -> Server:
    """Prefixes return after times of mean 60 s. The server really keeps them for `kept_s`, and predicted
    hits are wrong by the factor `scale`.
    """
    rng = random.Random(seed)
    server = Server(size)
    for n in range(requests):
        unused_s = rng.expovariate(1 / 60)
        predicted = rng.randrange(200, 4000)
        hit = predicted * scale if unused_s <= kept_s else 0.0
        server.request(unused_s=unused_s, predicted=predicted, hit=hit)
        if n % 5 == 4:
            server.scrape(bounded=bounded)
    return server


def test_the_size_grows_while_the_stalest_predictions_hold() -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=10_000)
    assert size.truth > 0.9
    assert size.factor > 4


def test_the_size_shrinks_where_the_stalest_predictions_fail() -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=100)
    assert size.truth < 0.4
    assert size.factor < 0.5


@pytest.mark.parametrize("scale", [0.8, 0.95, 1.1])
def test_an_error_of_all_predictions_alike_is_not_taken_for_a_small_cache(scale: float) -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=10_000, scale=scale)
    assert size.truth > 0.85
    assert size.factor > 2


def test_a_mirror_that_is_not_full_tells_nothing_about_a_larger_one() -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=10_000, bounded=False)
    assert size.factor == 1.0


def test_a_mirror_that_is_not_full_may_still_be_too_large() -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=60, bounded=False)
    assert size.factor < 0.5


def test_evidence_of_several_servers_adds_up() -> None:
    one, many = CacheSize(), CacheSize()
    traffic(one, requests=250, kept_s=10_000)
    for seed in range(4):
        traffic(many, requests=250, kept_s=10_000, seed=seed)
    assert many.factor > 2 * one.factor > 2


def test_what_waits_is_not_counted_against_the_predictions() -> None:
    """Requests in a queue are predicted, but the server has not looked them up yet."""
    size = CacheSize()
    server = Server(size)
    for _ in range(300):
        server.request(unused_s=1.0)
        server.request(unused_s=500.0)
        hits, server.hits = server.hits, server.hits - 2000
        server.scrape(waiting=2)
        server.hits = hits
        server.scrape()
    assert size.factor > 2


def test_hits_that_were_not_foreseen_are_no_evidence_against_those_that_were() -> None:
    """A mirror that is far too small predicts few of the hits, and all of its predictions are true."""
    size = CacheSize()
    server, rng = Server(size), random.Random(5)
    for n in range(1500):
        if rng.random() < 0.3:
            server.request(unused_s=rng.expovariate(1 / 10))
        else:
            server.window.predicted(size.staleness, tokens=0, others=1000, unused_s=0.0)
            server.hits += 1000 * (rng.random() < 0.6)
        if n % 5 == 4:
            server.scrape()
    assert size.truth > 0.8
    assert size.factor > 1.2


def test_a_counter_that_starts_anew_starts_a_new_window() -> None:
    size = CacheSize()
    server = traffic(size, requests=500, kept_s=10_000)
    before = size.factor
    for _ in range(20):
        server.request(unused_s=500.0)
    server.hits = 0.0
    server.scrape()
    assert size.factor == before
    assert server.window.requests == 0


def test_the_stalest_tenth_is_what_counts_as_stale() -> None:
    size, window, rng = CacheSize(), HitWindow(), random.Random(3)
    counted = [0, 0]
    for n in range(6000):
        before = window.stale_requests
        window.predicted(size.staleness, tokens=1000, others=0, unused_s=rng.expovariate(1 / 60))
        if n >= 1000:
            counted[window.stale_requests - before] += 1
    assert 0.05 < counted[1] / sum(counted) < 0.2


@given(
    events=st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()), max_size=60
    )
)
def test_whatever_the_counters_say_the_size_stays_within_its_bounds(
    events: list[tuple[int, float, float, bool]],
) -> None:
    size = CacheSize()
    server = Server(size)
    for tokens, unused_s, hit, bounded in events:
        server.request(unused_s=unused_s, predicted=tokens, hit=hit)
        server.scrape(bounded=bounded)
        assert 1 / SPAN <= size.factor <= SPAN
        assert 0 <= size.truth <= 1
