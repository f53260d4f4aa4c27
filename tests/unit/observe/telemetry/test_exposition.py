"""The page of plain numbers equals that of prometheus_client."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from epp.base.metric import counter, gauge, histogram
from epp.observe.telemetry.counts import Distribution
from epp.observe.telemetry.metrics import MetricGroup, families

BUCKETS = (0.001, 0.5, 1.0, 60.0)
BOUNDS = st.sampled_from(BUCKETS)
VALUES = st.floats(0, 100) | BOUNDS | BOUNDS.map(lambda b: math.nextafter(b, 2 * b))


@dataclass
class Counted:
    things: int = counter("t_things_total", "Things.")
    now: int = gauge("t_now", "Things now.")
    seconds: Distribution = histogram("t_seconds", "Time.", default_factory=lambda: Distribution(BUCKETS))
    not_shown: int = 9


@dataclass
class Server:
    speed: float | None = gauge("t_speed", "Speed.")
    state: str = gauge("t_state", "Always 1.", "state")
    answers: Mapping[str, int] = counter("t_answers_total", "Answers.", "class")
    pairs: Mapping[tuple[str, str], int] = counter("t_pairs_total", "Pairs.", "left", "right")


Sample = tuple[str, str, str, tuple[tuple[str, str], ...], float]


def samples(found: Iterable[Metric]) -> list[Sample]:
    return sorted(
        (family.name, family.type, sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in found
        for sample in family.samples
        if not sample.name.endswith("_created")
    )


def page_of(of: type, objects: Mapping[str, object], *labels: str) -> list[Metric]:
    rows = [((name,) if labels else (), thing) for name, thing in objects.items()]
    return list(families(rows, groups=[MetricGroup("Things", of, labels)]))


@given(st.lists(VALUES, max_size=30), st.lists(st.integers(0, 10**6), max_size=5), st.integers(-5, 5))
def test_the_page_equals_that_of_the_prometheus_library(
    seconds: list[float], things: list[int], now: int
) -> None:
    counted, theirs = Counted(), CollectorRegistry()
    their_counter = Counter("t_things_total", "Things.", registry=theirs)
    their_gauge = Gauge("t_now", "Things now.", registry=theirs)
    their_histogram = Histogram("t_seconds", "Time.", buckets=BUCKETS, registry=theirs)
    for value in seconds:
        counted.seconds.observe(value)
        their_histogram.observe(value)
    for amount in things:
        counted.things += amount
        their_counter.inc(amount)
    counted.now += now
    their_gauge.inc(now)
    assert samples(page_of(Counted, {"": counted})) == samples(theirs.collect())


def test_none_gives_no_series_and_no_objects_give_no_family() -> None:
    silent = page_of(Server, {"b": Server(None, "")}, "server")
    assert {s[0] for s in samples(silent)} == {"t_state"}
    assert page_of(Server, {}, "server") == []
