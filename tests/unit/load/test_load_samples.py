"""Quantiles of many values in bounded memory."""

from __future__ import annotations

import json
import random

import pytest

from bench.load.samples import Samples


def test_quantiles_are_within_half_a_percent_of_the_sorted_values() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(-2, 1.5) for _ in range(5000)]
    samples = Samples(values)
    ordered = sorted(values)
    for share in (0.01, 0.25, 0.5, 0.9, 0.99, 0.999):
        exact = ordered[max(0, -(-int(share * 1_000_000) * len(values) // 1_000_000) - 1)]
        assert samples.quantile(share) == pytest.approx(exact, rel=0.005)
    assert samples.quantile(1.0) == samples.most == ordered[-1]
    assert samples.mean == pytest.approx(sum(values) / len(values))
    samples.check_integrity()


def test_parts_add_up_to_the_whole_even_after_a_way_through_json() -> None:
    values = [0.001 * n for n in range(1, 400)]
    whole, parts = Samples(values), Samples()
    for n in range(3):
        parts.merge(Samples.of(json.loads(json.dumps(Samples(values[n::3]).document()))))
    assert parts.document()["buckets"] == whole.document()["buckets"]
    assert (parts.count, parts.least, parts.most) == (whole.count, whole.least, whole.most)
    parts.merge(Samples.of(Samples().document()))
    assert parts.count == whole.count
    parts.check_integrity()


def test_every_quantile_of_one_value_is_that_value_and_without_values_it_is_nan() -> None:
    assert Samples([0.25]).quantile(0.5) == 0.25
    assert Samples([0.25]).quantile(0.99) == 0.25
    assert Samples([0.0, 0.0]).quantile(0.5) == 0.0
    assert Samples().quantile(0.5) != Samples().quantile(0.5)
