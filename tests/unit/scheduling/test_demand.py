"""When each prefix was last asked for, and how many requests come at once with the same prompt."""

from __future__ import annotations

import pytest

from epp.scheduling.demand import AtOnce, Demand


def came(demand: Demand, prefix: int, *, now: float, least_s: float = 0.0, most_s: float = 99.0) -> object:
    earlier = demand.earlier(prefix, now=now)
    return earlier.between(least_s, most_s) if earlier is not None else None


def test_the_requests_for_a_prefix_within_a_time_are_counted_and_all_requests_since_the_first_of_them() -> (
    None
):
    demand = Demand()
    assert came(demand, 7, now=1.0) is None
    demand.asked(7, now=1.0)
    demand.asked(8, now=2.0)
    demand.asked(0, now=3.0)
    demand.asked(7, now=4.0)
    assert came(demand, 7, now=4.0) == (2, 4)
    assert came(demand, 7, now=4.0, most_s=2.0) == (1, 1)
    assert came(demand, 7, now=4.0, least_s=1.0) == (1, 4)
    assert came(demand, 7, now=4.0, least_s=1.0, most_s=2.0) == (0, 0)
    assert came(demand, 8, now=4.0) == (1, 3)
    assert came(demand, 0, now=4.0) is None, "no server held a part of the prompt"


def test_of_many_prefixes_and_many_requests_the_last_ones_stay() -> None:
    demand = Demand()
    for n in range(40):
        demand.asked(1, now=float(n))
    assert came(demand, 1, now=40.0) == (32, 32)
    for prefix in range(2, 4097):
        demand.asked(prefix, now=50.0)
    demand.asked(1, now=60.0)
    demand.asked(5000, now=60.0)
    demand.check_integrity()
    assert came(demand, 2, now=60.0) is None, "used least recently"
    assert came(demand, 1, now=60.0, most_s=1.0) == (1, 2)
    assert came(demand, 3, now=60.0) is not None


def group(at_once: AtOnce, prompt: int, *, size: int, tokens: float = 3000.0, now: float) -> None:
    """So many requests for one prompt within 70 ms. The first has to compute it."""
    for n in range(size):
        at_once.came(prompt, tokens=0.0 if n else tokens, now=now + 0.01 * n)
        at_once.check_integrity()


def test_while_prompts_come_one_at_a_time_every_request_counts_as_alone() -> None:
    at_once = AtOnce()
    for n in range(200):
        group(at_once, n % 20 + 1, size=1, now=n * 0.05)
    assert at_once.expected(99, now=11.0) == 1.0


def test_the_size_of_groups_is_learned_within_ten_of_them_and_forgotten_within_a_hundred() -> None:
    at_once = AtOnce()
    for n in range(1, 11):
        group(at_once, n, size=8, now=float(n))
    assert at_once.expected(99, now=20.0) == pytest.approx(6.25)
    for n in range(11, 100):
        group(at_once, n, size=8, now=float(n))
    assert at_once.expected(999, now=100.0) == pytest.approx(8.0, rel=0.05)
    for n in range(100, 400):
        group(at_once, n, size=1, now=float(n))
    assert at_once.expected(999, now=500.0) == pytest.approx(1.0, abs=0.1)


def test_only_the_first_request_of_a_group_decides_for_the_others() -> None:
    at_once = AtOnce()
    for n in range(1, 11):
        group(at_once, n, size=8, now=float(n))
    at_once.came(99, tokens=3000.0, now=20.0)
    assert at_once.expected(99, now=20.09) == 1.0
    assert at_once.expected(98, now=20.09) > 5.0
    assert at_once.expected(99, now=20.11) > 5.0, "this one comes too late to be of the group"
    assert at_once.expected(0, now=20.11) == 1.0, "a prompt without a full chunk"


def test_a_prompt_that_is_cached_everywhere_makes_no_groups_however_often_it_comes() -> None:
    at_once = AtOnce()
    for n in range(1000):
        at_once.came(7, tokens=1.0, now=n * 0.01)
    assert at_once.expected(99, now=11.0) < 1.1


def test_few_groups_are_kept() -> None:
    at_once = AtOnce()
    for n in range(1, 10_000):
        at_once.came(n, tokens=100.0, now=1.0)
        at_once.came(n, tokens=0.0, now=1.0)
    at_once.check_integrity()
    assert at_once.expected(9_999, now=1.0) == 1.0
    assert at_once.expected(1, now=1.0) > 1.5, "it is forgotten, so this is a first request again"


def test_a_flood_of_one_prompt_counts_like_a_group_of_sixteen_and_is_soon_forgotten() -> None:
    at_once = AtOnce()
    for n in range(1000):
        at_once.came(7, tokens=100_000.0, now=n * 0.00009)
    assert at_once.expected(99, now=1.0) < 16
    for n in range(100, 1300):
        at_once.came(n, tokens=500.0, now=n * 0.2)
    assert at_once.expected(99, now=1000.0) < 2


def test_long_prompts_that_come_alone_leave_the_price_as_it_is_to_the_last_digit() -> None:
    for tokens in (252_768.0, 253_278.0, 1_000_000.0):
        at_once = AtOnce()
        at_once.came(7, tokens=tokens, now=1.0)
        at_once.check_integrity()
        assert at_once.expected(99, now=2.0) == 1.0
