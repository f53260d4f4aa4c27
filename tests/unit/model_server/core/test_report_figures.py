"""The figures of the hash table report. They are counts, so they are the same on every machine. The
benchmark has all of them.
"""

import pytest

from bench.model_server.bench_hit_rate import (
    answers_for_the_reported_rate,
    family,
    identical_prompts,
    policies_on_one_trace,
)
from bench.model_server.report_workload import prompts, run
from model_server.core.cache_options import CacheOptions

pytestmark = pytest.mark.slow


def test_000_5_the_hit_rate_rises_linearly_with_share_of_frequent_prompts() -> None:
    [curve] = family(bounds=(2000,), answer_tokens=(5, 20))
    points, (slope, _, r_squared) = curve.points, curve.line
    assert r_squared >= 0.98
    assert 0.9 < slope < 1.1
    assert points[-1][1] >= 0.95


def test_000_5_full_blocks_alone_find_none_of_the_reports_prompts() -> None:
    found = run(prompts(1.0, seed=1), num_blocks=5000, options=CacheOptions(), answer_tokens=(5, 20))
    assert found.hit_tokens == 0


def test_000_5_a_small_bound_lowers_the_hit_rate_as_predicted() -> None:
    few, plenty = family(bounds=(8, 400), tenths=(1, 4, 7, 10), answer_tokens=(5, 20))
    for curve in (few, plenty):
        assert all(abs(rate - expected) < 0.04 for _, rate, expected in curve.points)
    assert few.line[2] < 0.97
    assert plenty.line[2] > 0.99


def test_000_6_a_repeated_prompt_is_found_whole_and_covers_expected_share() -> None:
    rates = identical_prompts()
    assert rates["prompts found"] >= 0.99
    assert abs(rates["prompt tokens found, of all tokens"] - rates["expected share of found tokens"]) < 0.01


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(5, 56.4), (6, 67.6)])
def test_000_6_answers_of_56_or_68_tokens_give_the_reports_8_14_percent(
    prompt_tokens: int, expected: float
) -> None:
    answer, rate = answers_for_the_reported_rate(prompt_tokens)
    assert answer == pytest.approx(expected, abs=0.1)
    assert rate == pytest.approx(0.0814, abs=0.004)


def test_000_3_a_larger_pool_of_unused_blocks_never_finds_less() -> None:
    curves = family(bounds=(5, 40, 320, 2000), tenths=(8,), answer_tokens=(5, 20))
    rates = [curve.points[0][1] for curve in curves]
    assert rates == sorted(rates)
    assert rates[0] < 0.1
    assert rates[-1] > 0.7


def test_000_8_lfu_keeps_lasting_favourites_and_ageing_the_changing_ones() -> None:
    [[_, lru, last_touch, lfu, ageing]] = policies_on_one_trace(num_requests=1000, pools=(400,))
    assert lru < ageing < lfu, "of lasting favourites ageing forgets some"
    assert abs(lru - last_touch) < 0.01  # the orders differ only for ends in the same step
    assert lfu > lru + 0.05  # a few prompts come often and many come once, which is where counting uses helps
    [[_, *changing]] = policies_on_one_trace(num_requests=1000, pools=(400,), drift_every=100)
    assert max(changing) == changing[3], "of changing favourites ageing forgets the old ones"
