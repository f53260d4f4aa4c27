"""Plain numbers show the same page as prometheus_client's own counters would."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from epp.telemetry.catalog import Spec
from epp.telemetry.counting import Counts

COUNTER = Spec("t_things_total", "counter", "Things.")
GAUGE = Spec("t_now", "gauge", "Things now.")
HISTOGRAM = Spec("t_seconds", "histogram", "Time.", buckets=(0.001, 0.5, 1.0, 60.0))
BOUNDS = st.sampled_from(HISTOGRAM.buckets)
VALUES = st.floats(0, 100) | BOUNDS | BOUNDS.map(lambda b: math.nextafter(b, 2 * b))

Sample = tuple[str, str, str, tuple[tuple[str, str], ...], float]


def samples(registry: CollectorRegistry) -> list[Sample]:
    return sorted(
        (family.name, family.type, sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    )


@given(st.lists(VALUES, max_size=30), st.lists(st.integers(0, 10**6), max_size=5), st.integers(-5, 5))
def test_the_page_is_that_of_the_library(seconds: list[float], things: list[int], now: int) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts()
    number, gauge, distribution = counts.number(COUNTER), counts.number(GAUGE), counts.distribution(HISTOGRAM)
    ours.register(counts)
    counter = Counter(COUNTER.name, COUNTER.help, registry=theirs)
    their_gauge = Gauge(GAUGE.name, GAUGE.help, registry=theirs)
    histogram = Histogram(HISTOGRAM.name, HISTOGRAM.help, buckets=HISTOGRAM.buckets, registry=theirs)
    for value in seconds:
        distribution.observe(value)
        histogram.observe(value)
    for amount in things:
        number.value += amount
        counter.inc(amount)
    gauge.value += now
    their_gauge.inc(now)
    assert samples(ours) == samples(theirs)


def test_the_page_says_since_when_it_counts() -> None:
    registry = CollectorRegistry()
    counts = Counts(unix_clock=lambda: 1234.0)
    counts.number(COUNTER)
    counts.distribution(HISTOGRAM)
    registry.register(counts)
    assert registry.get_sample_value("t_things_created") == 1234.0
    assert registry.get_sample_value("t_seconds_created") == 1234.0
