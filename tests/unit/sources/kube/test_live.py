"""The hit ratio over the last five minutes, from counters of servers that come, go and restart."""

from __future__ import annotations

import pytest

from epp.sources.kube.live import HitRatio, LiveEndpoint, ratio_text


def counters(**names: tuple[float, float] | None) -> list[LiveEndpoint]:
    return [LiveEndpoint(n, "vllm", "", *(c or (None, None))) for n, c in names.items()]


def test_the_hit_ratio_is_that_of_all_endpoints_since_they_were_first_seen() -> None:
    ratio = HitRatio()
    ratio.observe(counters(a=(1000, 900), b=(0, 0)), now=0.0)
    assert ratio.text(now=0.0) is None, "nothing was looked up meanwhile"
    ratio.observe(counters(a=(1100, 950), b=(300, 50)), now=1.0)
    assert ratio.text(now=1.0) == "0.250"
    ratio.check_integrity()


def test_a_counter_that_fell_counts_from_its_new_value() -> None:
    ratio = HitRatio()
    ratio.observe(counters(a=(1000, 900)), now=0.0)
    ratio.observe(counters(a=(10, 0)), now=1.0)
    ratio.observe(counters(a=(20, 5)), now=2.0)
    assert ratio.text(now=2.0) == "0.500"


def test_a_server_without_fresh_metrics_counts_on_from_its_last_page() -> None:
    ratio = HitRatio()
    ratio.observe(counters(a=(0, 0)), now=0.0)
    ratio.observe(counters(a=None), now=1.0)
    ratio.observe(counters(a=(100, 40)), now=2.0)
    assert ratio.text(now=2.0) == "0.400"


def test_hits_older_than_five_minutes_no_longer_count() -> None:
    ratio = HitRatio()
    ratio.observe(counters(a=(0, 0)), now=0.0)
    ratio.observe(counters(a=(100, 100)), now=1.0)
    ratio.observe(counters(a=(200, 100)), now=290.0)
    assert ratio.text(now=290.0) == "0.500"
    ratio.observe(counters(a=(200, 100)), now=305.0)
    assert ratio.text(now=305.0) == "0.000"
    ratio.check_integrity()


def test_an_endpoint_that_left_and_came_back_counts_from_its_return() -> None:
    ratio = HitRatio()
    ratio.observe(counters(a=(0, 0)), now=0.0)
    ratio.observe(counters(), now=1.0)
    ratio.observe(counters(a=(500, 500)), now=2.0)
    assert ratio.text(now=2.0) is None
    ratio.observe(counters(a=(600, 525)), now=3.0)
    assert ratio.text(now=3.0) == "0.250"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, None), (1, 0, None), (1, 3, "0.333"), (0, 5, "0.000"), (7, 5, "1.000"), (-1, 5, "0.000")],
)
def test_ratio_fits_the_pattern_of_crd_and_there_is_no_ratio_of_nothing(
    part: float, whole: float, text: str | None
) -> None:
    assert ratio_text(part, whole) == text
