"""How many requests come at once with the same prompt."""

from __future__ import annotations

import pytest

from epp.scheduling.at_once import AtOnce


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
