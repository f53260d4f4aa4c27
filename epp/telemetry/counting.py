"""What is counted for every request, kept as plain numbers and turned into metrics when Prometheus asks.

prometheus_client takes a lock, checks labels and walks the buckets at each addition, since it serves any program. Here one
thread counts and the same thread is asked, so an addition is an addition. Used by `metrics` alone.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from math import inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from epp.telemetry.catalog import Spec


class Number:
    """A counter or gauge without labels; whoever counts adds to `value`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Labelled:
    """A counter with labels, of which the values are few."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], float] = {}

    def add(self, labels: tuple[str, ...]) -> None:
        self.counts[labels] = self.counts.get(labels, 0.0) + 1.0


class Distribution:
    """A histogram without labels. A bound belongs to its own bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets as Prometheus wants them, each with all below it, and the sum of all values."""
        bounds = map(floatToGoString, (*self._bounds, inf))
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class Counts(Collector):
    """Makes numbers and distributions, and tells them all."""

    def __init__(self, *, unix_clock: Callable[[], float] = time.time) -> None:
        self._created = unix_clock()
        self._numbers: list[tuple[Spec, Number]] = []
        self._labelled: list[tuple[Spec, Labelled]] = []
        self._distributions: list[tuple[Spec, Distribution]] = []

    def number(self, spec: Spec) -> Number:
        made = Number()
        self._numbers.append((spec, made))
        return made

    def labelled(self, spec: Spec) -> Labelled:
        made = Labelled()
        self._labelled.append((spec, made))
        return made

    def distribution(self, spec: Spec) -> Distribution:
        made = Distribution(spec.buckets)
        self._distributions.append((spec, made))
        return made

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        for spec, number in self._numbers:
            if spec.kind == "gauge":
                gauge = GaugeMetricFamily(spec.name, spec.help)
                gauge.add_metric((), number.value)
                yield gauge
            else:
                counter = CounterMetricFamily(spec.name, spec.help)
                counter.add_metric((), number.value, created=self._created)
                yield counter
        for spec, labelled in self._labelled:
            counter = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, value in labelled.counts.items():
                counter.add_metric(labels, value, created=self._created)
            yield counter
        for spec, distribution in self._distributions:
            family = HistogramMetricFamily(spec.name, spec.help)
            buckets, total = distribution.told()
            family.add_metric((), buckets, total)
            family.add_sample(f"{spec.name}_created", {}, self._created)
            yield family
