"""What the picker learns from a server's own counters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.growth import computed_growth, growth, restarted
from epp.endpoints.learned import TokenEstimate, sample_of
from epp.endpoints.state import CounterWindow
from epp.server_caches import estimated_tokens
from epp.types import EndpointMetrics, PromptSize


def page(at: float, **values: float) -> EndpointMetrics:
    return EndpointMetrics(scraped_at=at, **values)  # type: ignore[arg-type]  # counts given as float or int alike


def idle(at: float, *, finished: float, prompt_tokens: float, running: int = 0) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_at=at, finished=finished, prompt_tokens=prompt_tokens, running=running, waiting=0
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1.0, 4.0, 3.0), (4.0, 1.0, 0.0), (None, 4.0, 0.0), (4.0, None, 0.0), (None, None, 0.0)],
)
def test_growth_is_never_negative_and_unknown_is_none(
    before: float | None, after: float | None, expected: float
) -> None:
    assert growth(before, after) == expected


def test_computed_tokens_are_those_not_cached() -> None:
    before = page(0, prompt_tokens=100, cached_prompt_tokens=50)
    after = page(1, prompt_tokens=400, cached_prompt_tokens=150)
    assert computed_growth(before, after) == 200


def test_computed_tokens_are_all_where_the_server_does_not_tell_cached_ones() -> None:
    assert computed_growth(page(0, prompt_tokens=100), page(1, prompt_tokens=400)) == 300


def test_counters_read_at_unlike_moments_never_give_negative_work() -> None:
    before = page(0, prompt_tokens=100, cached_prompt_tokens=50)
    assert computed_growth(before, page(1, prompt_tokens=110, cached_prompt_tokens=90)) == 0


def test_a_counter_that_fell_tells_a_restart() -> None:
    assert restarted(page(0, prompt_tokens=10), page(1, prompt_tokens=9))
    assert restarted(page(0, prefix_queries=10), page(1, prefix_queries=0))
    assert not restarted(page(0, prompt_tokens=10), page(1, prompt_tokens=10))
    assert not restarted(page(0, prompt_tokens=10), page(1))


def test_an_estimate_starts_from_the_policy_and_follows_what_is_told() -> None:
    estimate = TokenEstimate(start=4.0)
    assert estimated_tokens(PromptSize(4000), estimate.terms) == 1000
    for _ in range(50):
        estimate.learn(PromptSize(2000), 1000)
    assert estimated_tokens(PromptSize(4000), estimate.terms) == pytest.approx(2000, rel=0.02)
    assert estimate.bytes_per_token == pytest.approx(2.0, rel=0.02)


def test_a_change_of_language_shows_within_some_hundred_requests() -> None:
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


def a_request(kind: str, rng: random.Random) -> tuple[PromptSize, float]:
    """Return one prompt of this kind, and the number of tokens that a tokenizer would make of it, within a
    twentieth.
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
    asked = [a_request(kind, rng) for _ in range(200)]
    return sum(abs(estimated_tokens(size, estimate.terms) / tokens - 1) for size, tokens in asked) / len(
        asked
    )


@pytest.mark.parametrize(
    "kinds", [["english"], ["code"], ["chinese"], ["pictures"], ["english", "chinese", "pictures"]]
)
@pytest.mark.parametrize("seed", range(3))
def test_any_kind_of_traffic_is_estimated_within_a_tenth_after_a_hundred_requests(
    kinds: list[str], seed: int
) -> None:
    estimate, rng = TokenEstimate(start=4.0), random.Random(seed)
    for _ in range(100):
        estimate.learn(*a_request(rng.choice(kinds), rng))
    for kind in kinds:
        assert worst_error(estimate, kind, rng) < 0.1


@given(
    st.lists(
        st.tuples(st.integers(-10, 10**6), st.floats(0, 1), st.integers(0, 50), st.floats(-10, 1e6)),
        max_size=50,
    )
)
def test_an_estimate_is_never_negative_nor_absurdly_low_whatever_is_told(
    pairs: list[tuple[int, float, int, float]],
) -> None:
    estimate = TokenEstimate(start=4.0)
    for size, share, opaque, tokens in pairs:
        told = PromptSize(size, share * size, opaque)
        estimate.learn(told, tokens)
        assert estimated_tokens(PromptSize(640, share * 640, opaque), estimate.terms) >= 10
        assert 0 < estimate.bytes_per_token < float("inf")


def test_a_window_that_was_ours_alone_gives_a_sample() -> None:
    window = CounterWindow()
    assert sample_of(window, idle(0, finished=7, prompt_tokens=100)) is None
    for _ in range(20):
        window.ended(PromptSize(400))
    assert sample_of(window, idle(1, finished=27, prompt_tokens=2100)) == (PromptSize(8000), 2000.0)


def test_a_window_with_somebody_elses_requests_gives_none_and_starts_anew() -> None:
    window = CounterWindow()
    sample_of(window, idle(0, finished=0, prompt_tokens=0))
    for _ in range(20):
        window.ended(PromptSize(400))
    assert sample_of(window, idle(1, finished=21, prompt_tokens=9999)) is None
    for _ in range(20):
        window.ended(PromptSize(400))
    assert sample_of(window, idle(2, finished=41, prompt_tokens=9999 + 1600)) == (PromptSize(8000), 1600.0)


def test_a_window_waits_until_nothing_is_in_flight() -> None:
    window = CounterWindow()
    sample_of(window, idle(0, finished=0, prompt_tokens=0))
    for _ in range(20):
        window.ended(PromptSize(400))
    assert sample_of(window, idle(1, finished=20, prompt_tokens=2500, running=1)) is None
    assert sample_of(window, idle(2, finished=20, prompt_tokens=2500)) == (PromptSize(8000), 2500.0)


def test_a_window_survives_a_restart_of_its_server() -> None:
    window = CounterWindow()
    sample_of(window, idle(0, finished=50, prompt_tokens=5000))
    for _ in range(20):
        window.ended(PromptSize(400))
    assert sample_of(window, idle(1, finished=3, prompt_tokens=30)) is None
    for _ in range(20):
        window.ended(PromptSize(400))
    assert sample_of(window, idle(2, finished=23, prompt_tokens=2030)) == (PromptSize(8000), 2000.0)


def test_servers_that_do_not_count_finished_requests_give_no_sample() -> None:
    window = CounterWindow()
    for second in range(5):
        for _ in range(20):
            window.ended(PromptSize(400))
        assert sample_of(window, page(second, prompt_tokens=1000.0 * second)) is None


@pytest.mark.parametrize("tokens", [1e15, 1e6, 100.0])
def test_what_no_tokenizer_makes_of_a_prompt_teaches_nothing(tokens: float) -> None:
    """Before, one server's counters shrank the caches of all servers of its model to nothing."""
    estimate = TokenEstimate(start=4.0)
    estimate.learn(PromptSize(100_000), tokens)
    assert estimate.bytes_per_token == 4.0
    assert estimated_tokens(PromptSize(4000), estimate.terms) == 1000
