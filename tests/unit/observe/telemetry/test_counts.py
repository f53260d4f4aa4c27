"""Counters of events: each object begins at zero and shares nothing with another."""

from __future__ import annotations

from dataclasses import fields

import pytest

from epp.observe.telemetry.counts import Distribution, ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.metrics import observe


def test_value_counts_in_the_bucket_of_first_bound_that_is_not_below_it() -> None:
    times = Distribution((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.1, 5.0, 5.1, 1e9):
        observe(times, value)
    assert times.counts == [2, 1, 1, 2]
    assert times.cumulative() == [2, 3, 4, 6]
    assert times.total == pytest.approx(1e9 + 12.2)


@pytest.mark.parametrize("kind", [RequestCounts, ServerCounts, ProcessCounts])
def test_every_count_begins_at_zero_and_belongs_to_one_object(
    kind: type[RequestCounts | ServerCounts | ProcessCounts],
) -> None:
    first, second = kind(), kind()
    for field in fields(kind):
        value = getattr(first, field.name)
        assert "metric" in field.metadata, f"{field.name} is counted, but not shown"
        if isinstance(value, Distribution):
            assert value.total == sum(value.counts) == 0
            assert list(value.bounds) == sorted(set(value.bounds))
            assert value is not getattr(second, field.name)
        elif isinstance(value, dict):
            assert value["anything"] == 0
            assert value is not getattr(second, field.name)
        else:
            assert value == 0
