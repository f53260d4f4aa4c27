"""What the picker learns about a model: the tokens of a prompt, and how the assumed size of a cache follows
the servers' counters.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import EndpointMetrics, PromptSize
from epp.picker.endpoints.learned import CacheSize, CounterWindow, HitWindow, TokenEstimate, sample_of
from epp.picker.server_caches import count_prediction, estimated_tokens


def one_more_ended(window: CounterWindow, size: PromptSize) -> None:
    window.own, window.size = window.own + 1, window.size + size


def idle(at: float, *, finished: float, prompt_tokens: float, running: int = 0) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_at=at, finished=finished, prompt_tokens=prompt_tokens, running=running, waiting=0
    )


def test_estimate_starts_from_the_policy_and_follows_the_reported_counts() -> None:
    estimate = TokenEstimate(start=4.0)
    assert estimated_tokens(PromptSize(4000), estimate.terms) == 1000
    for _ in range(50):
        estimate.learn(PromptSize(2000), 1000)
    assert estimated_tokens(PromptSize(4000), estimate.terms) == pytest.approx(2000, rel=0.02)
    assert estimate.bytes_per_token == pytest.approx(2.0, rel=0.02)


def test_a_change_of_language_shows_within_600_requests() -> None:
    estimate = TokenEstimate(start=4.0)
    for _ in range(5000):
        estimate.learn(PromptSize(4000), 1000)
    for _ in range(600):
        estimate.learn(PromptSize(1500), 1000)
    assert estimated_tokens(PromptSize(1500), estimate.terms) == pytest.approx(1000, rel=0.1)


ENGLISH, CODE = 0.24, 0.31
"""The number of tokens for each byte. The kinds are Chinese, whose characters have three bytes, and
pictures.
"""
CHINESE, PICTURE = 0.9, 1100


def sized_prompt(kind: str, rng: random.Random) -> tuple[PromptSize, float]:
    """Return one prompt of this kind, and the number of tokens that a tokenizer would make of it. The number
    varies by a twentieth.
    """
    size, noise = rng.randrange(300, 20_000), rng.uniform(0.95, 1.05)
    if kind == "chinese":
        return PromptSize(3 * size, 2.0 * size), CHINESE * size * noise
    if kind == "pictures":
        count = rng.randrange(1, 4)
        return PromptSize(size, 0.0, count), (ENGLISH * size + PICTURE * count) * noise
    return PromptSize(size), (CODE if kind == "code" else ENGLISH) * size * noise


def worst_error(estimate: TokenEstimate, kind: str, rng: random.Random) -> float:
    """Return the mean error over prompts of the kind, as a share."""
    asked = [sized_prompt(kind, rng) for _ in range(200)]
    return sum(abs(estimated_tokens(size, estimate.terms) / tokens - 1) for size, tokens in asked) / len(
        asked
    )


@pytest.mark.parametrize(
    "kinds", [["english"], ["code"], ["chinese"], ["pictures"], ["english", "chinese", "pictures"]]
)
@pytest.mark.parametrize("seed", range(3))
def test_traffic_is_estimated_within_a_tenth_after_a_hundred_requests(kinds: list[str], seed: int) -> None:
    estimate, rng = TokenEstimate(start=4.0), random.Random(seed)
    for _ in range(100):
        estimate.learn(*sized_prompt(rng.choice(kinds), rng))
    for kind in kinds:
        assert worst_error(estimate, kind, rng) < 0.1


@given(
    st.lists(
        st.tuples(st.integers(-10, 10**6), st.floats(0, 1), st.integers(0, 50), st.floats(-10, 1e6)),
        max_size=50,
    )
)
def test_an_estimate_is_never_negative_or_absurdly_low(
    pairs: list[tuple[int, float, int, float]],
) -> None:
    estimate = TokenEstimate(start=4.0)
    for size, share, opaque, tokens in pairs:
        told = PromptSize(size, share * size, opaque)
        estimate.learn(told, tokens)
        assert estimated_tokens(PromptSize(640, share * 640, opaque), estimate.terms) >= 10
        assert 0 < estimate.bytes_per_token < float("inf")


def test_a_window_with_only_our_requests_gives_a_sample() -> None:
    window = CounterWindow()
    assert sample_of(window, idle(0, finished=7, prompt_tokens=100)) is None
    for _ in range(20):
        one_more_ended(window, PromptSize(400))
    assert sample_of(window, idle(1, finished=27, prompt_tokens=2100)) == (PromptSize(8000), 2000.0)


def test_a_window_with_unknown_requests_gives_no_sample() -> None:
    window = CounterWindow()
    sample_of(window, idle(0, finished=0, prompt_tokens=0))
    for _ in range(20):
        one_more_ended(window, PromptSize(400))
    assert sample_of(window, idle(1, finished=21, prompt_tokens=9999)) is None
    for _ in range(20):
        one_more_ended(window, PromptSize(400))
    assert sample_of(window, idle(2, finished=41, prompt_tokens=9999 + 1600)) == (PromptSize(8000), 1600.0)


def test_a_window_waits_until_nothing_is_in_flight() -> None:
    window = CounterWindow()
    sample_of(window, idle(0, finished=0, prompt_tokens=0))
    for _ in range(20):
        one_more_ended(window, PromptSize(400))
    assert sample_of(window, idle(1, finished=20, prompt_tokens=2500, running=1)) is None
    assert sample_of(window, idle(2, finished=20, prompt_tokens=2500)) == (PromptSize(8000), 2500.0)


def test_a_window_survives_a_restart_of_its_server() -> None:
    window = CounterWindow()
    sample_of(window, idle(0, finished=50, prompt_tokens=5000))
    for _ in range(20):
        one_more_ended(window, PromptSize(400))
    assert sample_of(window, idle(1, finished=3, prompt_tokens=30)) is None
    for _ in range(20):
        one_more_ended(window, PromptSize(400))
    assert sample_of(window, idle(2, finished=23, prompt_tokens=2030)) == (PromptSize(8000), 2000.0)


def test_servers_that_do_not_count_finished_requests_give_no_sample() -> None:
    window = CounterWindow()
    for second in range(5):
        for _ in range(20):
            one_more_ended(window, PromptSize(400))
        assert sample_of(window, EndpointMetrics(scraped_at=second, prompt_tokens=1000.0 * second)) is None


@pytest.mark.parametrize("tokens", [1e15, 1e6, 100.0])
def test_token_counts_that_no_tokenizer_could_produce_teach_nothing(tokens: float) -> None:
    """Before, one server's counters shrank the caches of all servers of its model to nothing."""
    estimate = TokenEstimate(start=4.0)
    estimate.learn(PromptSize(100_000), tokens)
    assert estimate.bytes_per_token == 4.0
    assert estimated_tokens(PromptSize(4000), estimate.terms) == 1000


SPAN = 32.0


class CacheCounters:
    """A server's counters, and the picker's estimate of the server."""

    def __init__(self, size: CacheSize) -> None:
        self.size = size
        self.window = HitWindow()
        self.hits = 0.0
        self.now = 0.0
        self.scrape()

    def request(self, *, unused_s: float, predicted: int = 1000, hit: float = 1000.0) -> None:
        count_prediction(self.window, self.size.staleness, tokens=predicted, others=100, unused_s=unused_s)
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
) -> CacheCounters:
    """Prefixes return after 60 s on average. The server really keeps them for `kept_s`, and predicted
    hits are wrong by the factor `scale`.
    """
    rng = random.Random(seed)
    server = CacheCounters(size)
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


def test_the_size_shrinks_if_the_stalest_predictions_fail() -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=100)
    assert size.truth < 0.4
    assert size.factor < 0.5


@pytest.mark.parametrize("scale", [0.8, 0.95, 1.1])
def test_an_equal_error_of_all_predictions_is_not_taken_for_a_small_cache(scale: float) -> None:
    size = CacheSize()
    traffic(size, requests=1000, kept_s=10_000, scale=scale)
    assert size.truth > 0.85
    assert size.factor > 2


def test_a_mirror_that_is_not_full_gives_no_evidence_for_a_larger_one() -> None:
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


def test_waiting_requests_are_not_counted_against_the_predictions() -> None:
    """Requests in a queue are predicted, but the server has not looked them up yet."""
    size = CacheSize()
    server = CacheCounters(size)
    for _ in range(300):
        server.request(unused_s=1.0)
        server.request(unused_s=500.0)
        hits, server.hits = server.hits, server.hits - 2000
        server.scrape(waiting=2)
        server.hits = hits
        server.scrape()
    assert size.factor > 2


def test_unexpected_hits_are_no_evidence_against_the_predicted_hits() -> None:
    """A mirror that is far too small predicts few of the hits, and all of its predictions are true."""
    size = CacheSize()
    server, rng = CacheCounters(size), random.Random(5)
    for n in range(1500):
        if rng.random() < 0.3:
            server.request(unused_s=rng.expovariate(1 / 10))
        else:
            count_prediction(server.window, size.staleness, tokens=0, others=1000, unused_s=0.0)
            server.hits += 1000 * (rng.random() < 0.6)
        if n % 5 == 4:
            server.scrape()
    assert size.truth > 0.8
    assert size.factor > 1.2


def test_a_counter_that_was_reset_starts_a_new_window() -> None:
    size = CacheSize()
    server = traffic(size, requests=500, kept_s=10_000)
    before = size.factor
    for _ in range(20):
        server.request(unused_s=500.0)
    server.hits = 0.0
    server.scrape()
    assert size.factor == before
    assert server.window.requests == 0


def test_about_a_tenth_of_the_predictions_counts_as_stale() -> None:
    size, window, rng = CacheSize(), HitWindow(), random.Random(3)
    counted = [0, 0]
    for n in range(6000):
        before = window.stale_requests
        count_prediction(window, size.staleness, tokens=1000, others=0, unused_s=rng.expovariate(1 / 60))
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
    server = CacheCounters(size)
    for tokens, unused_s, hit, bounded in events:
        server.request(unused_s=unused_s, predicted=tokens, hit=hit)
        server.scrape(bounded=bounded)
        assert 1 / SPAN <= size.factor <= SPAN
        assert 0 <= size.truth <= 1
