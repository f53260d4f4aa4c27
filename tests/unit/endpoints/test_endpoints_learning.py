"""What is learned from a server's own counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.growth import computed_growth, growth, restarted
from epp.endpoints.learning import BytesPerToken, CounterWindow
from epp.types import EndpointMetrics


def page(at: float, **values: float) -> EndpointMetrics:
    return EndpointMetrics(scraped_at=at, **values)  # type: ignore[arg-type]  # counts given as float or int alike


def idle(at: float, *, finished: float, prompt_tokens: float, running: int = 0) -> EndpointMetrics:
    return EndpointMetrics(scraped_at=at, finished=finished, prompt_tokens=prompt_tokens, running=running)


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


def test_bytes_per_token_start_from_the_policy_and_follow_what_is_told() -> None:
    tokenizer = BytesPerToken(start=4.0)
    assert tokenizer.tokens(4000) == 1000
    for _ in range(50):
        tokenizer.learn(2000, 1000)
    assert tokenizer.ratio == pytest.approx(2.0, rel=0.02)


def test_a_change_of_language_shows_within_some_hundred_requests() -> None:
    tokenizer = BytesPerToken(start=4.0)
    for _ in range(5000):
        tokenizer.learn(4000, 1000)
    for _ in range(600):
        tokenizer.learn(1500, 1000)
    assert tokenizer.ratio == pytest.approx(1.5, rel=0.1)


@given(st.lists(st.tuples(st.floats(-10, 1e6), st.floats(-10, 1e6)), max_size=50))
def test_the_ratio_stays_a_positive_number_whatever_is_told(pairs: list[tuple[float, float]]) -> None:
    tokenizer = BytesPerToken(start=4.0)
    for size, tokens in pairs:
        tokenizer.learn(size, tokens)
        assert 0 < tokenizer.ratio < float("inf")


def test_a_window_that_was_ours_alone_gives_a_sample() -> None:
    window = CounterWindow()
    assert window.observe(idle(0, finished=7, prompt_tokens=100)) is None
    for _ in range(20):
        window.ended(400)
    assert window.observe(idle(1, finished=27, prompt_tokens=2100)) == (8000, 2000.0)


def test_a_window_with_somebody_elses_requests_gives_none_and_starts_anew() -> None:
    window = CounterWindow()
    window.observe(idle(0, finished=0, prompt_tokens=0))
    for _ in range(20):
        window.ended(400)
    assert window.observe(idle(1, finished=21, prompt_tokens=9999)) is None
    for _ in range(20):
        window.ended(400)
    assert window.observe(idle(2, finished=41, prompt_tokens=9999 + 1600)) == (8000, 1600.0)


def test_a_window_waits_until_nothing_is_in_flight() -> None:
    window = CounterWindow()
    window.observe(idle(0, finished=0, prompt_tokens=0))
    for _ in range(20):
        window.ended(400)
    assert window.observe(idle(1, finished=20, prompt_tokens=2500, running=1)) is None
    assert window.observe(idle(2, finished=20, prompt_tokens=2500)) == (8000, 2500.0)


def test_a_window_survives_a_restart_of_its_server() -> None:
    window = CounterWindow()
    window.observe(idle(0, finished=50, prompt_tokens=5000))
    for _ in range(20):
        window.ended(400)
    assert window.observe(idle(1, finished=3, prompt_tokens=30)) is None
    for _ in range(20):
        window.ended(400)
    assert window.observe(idle(2, finished=23, prompt_tokens=2030)) == (8000, 2000.0)


def test_servers_that_do_not_count_finished_requests_give_no_sample() -> None:
    window = CounterWindow()
    for second in range(5):
        for _ in range(20):
            window.ended(400)
        assert window.observe(page(second, prompt_tokens=1000.0 * second)) is None
