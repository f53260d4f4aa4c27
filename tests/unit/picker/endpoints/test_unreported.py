"""The estimated number of requests of other pickers that are not known here yet."""

import pytest

from epp.picker.endpoints.unreported import Unreported
from tests.invariants.fleet import check_unreported


def test_the_estimate_is_the_rate_of_the_others_times_the_age_of_the_news() -> None:
    unreported = Unreported()
    for n in range(4000):
        unreported.reported("m", age_s=0.075, now=n / 1000)
    assert unreported.picks("m", now=4.0) == pytest.approx(75, rel=0.03)
    without_news = unreported.picks("m", now=5.0)
    assert without_news == pytest.approx(75 / 2.718, rel=0.05), "the others are assumed to send less"
    assert unreported.picks("m", now=60.0) == pytest.approx(0.0)
    check_unreported(unreported)


def test_old_news_after_an_interruption_and_clocks_that_differ_do_no_harm() -> None:
    unreported = Unreported()
    unreported.reported("m", age_s=3600.0, now=1.0)
    unreported.reported("m", age_s=-5.0, now=0.5)
    assert unreported.picks("m", now=1.0) <= 1.0
    check_unreported(unreported)


def test_unreported_requests_are_estimated_for_each_model_apart() -> None:
    unreported = Unreported()
    unreported.reported("m", age_s=0.5, now=1.0)
    assert unreported.picks("m", now=1.0) == 0.5
    assert unreported.picks("other", now=1.0) == 0.0
