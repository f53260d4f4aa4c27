"""The growth of a server's counters between two scrapes."""

from __future__ import annotations

import pytest

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.growth import computed_growth, growth, restarted


def counted_page(at: float, **values: float) -> EndpointMetrics:
    return EndpointMetrics(scraped_at=at, **values)  # type: ignore[arg-type]  # counts given as float or int alike


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1.0, 4.0, 3.0), (4.0, 1.0, 0.0), (None, 4.0, 0.0), (4.0, None, 0.0), (None, None, 0.0)],
)
def test_growth_is_never_negative_and_unknown_is_none(
    before: float | None, after: float | None, expected: float
) -> None:
    assert growth(before, after) == expected


def test_computed_tokens_are_those_not_cached() -> None:
    before = counted_page(0, prompt_tokens=100, cached_prompt_tokens=50)
    after = counted_page(1, prompt_tokens=400, cached_prompt_tokens=150)
    assert computed_growth(before, after) == 200


def test_all_prompt_tokens_count_as_computed_if_the_server_does_not_report_cached_ones() -> None:
    assert computed_growth(counted_page(0, prompt_tokens=100), counted_page(1, prompt_tokens=400)) == 300


def test_counters_read_at_different_moments_never_give_negative_work() -> None:
    before = counted_page(0, prompt_tokens=100, cached_prompt_tokens=50)
    assert computed_growth(before, counted_page(1, prompt_tokens=110, cached_prompt_tokens=90)) == 0


def test_a_counter_that_fell_shows_a_restart() -> None:
    assert restarted(counted_page(0, prompt_tokens=10), counted_page(1, prompt_tokens=9))
    assert restarted(counted_page(0, prefix_queries=10), counted_page(1, prefix_queries=0))
    assert not restarted(counted_page(0, prompt_tokens=10), counted_page(1, prompt_tokens=10))
    assert not restarted(counted_page(0, prompt_tokens=10), counted_page(1))
