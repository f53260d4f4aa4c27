"""Turns objects whose fields declare metrics (`base.metric`) into pages for Prometheus. Used by `metrics` and
`reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from epp.base.metric import Metric
from epp.observe.telemetry.counts import Distribution

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, object]]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class MetricGroup(Generic[S]):
    """The metrics of one class. `rows` finds the objects of this class, each with the values of `labels`."""

    title: str
    of: type
    rows: Callable[[S], Rows]
    labels: Labels = ()

    def metrics(self) -> Iterator[tuple[str, Metric]]:
        """Yield the declared metrics by field, in the class's order. The object's labels come first."""
        for each in fields(self.of):
            metric = each.metadata.get("metric")
            if metric is not None:
                yield each.name, replace(metric, labels=(*self.labels, *metric.labels))


class Exposition(Collector, Generic[S]):
    """All groups, read from `shown` each time that Prometheus asks."""

    def __init__(self, groups: Iterable[MetricGroup[S]], shown: Callable[[], S]) -> None:
        self._groups = [(group, tuple(group.metrics())) for group in groups]
        self._shown = shown

    def describe(self) -> Iterable[Family]:
        """Without this method, registering would ask for a state that does not exist yet."""
        return [self._family(metric, []) for _, metrics in self._groups for _, metric in metrics]

    def collect(self) -> Iterator[Family]:
        shown = self._shown()
        for group, metrics in self._groups:
            rows = list(group.rows(shown))
            for name, metric in metrics if rows else ():
                yield self._family(metric, [(labels, getattr(row, name)) for labels, row in rows])

    def _family(self, metric: Metric, values: list[tuple[Labels, Any]]) -> Family:
        match metric.kind:
            case "histogram":
                histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in values:
                    histogram.add_metric(labels, _buckets(value), value.total)
                return histogram
            case "counter":
                counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in _samples(values):
                    counter.add_metric(labels, value)
                return counter
            case "gauge":
                gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in _samples(values):
                    gauge.add_metric(labels, value)
                return gauge


def _samples(values: Iterable[tuple[Labels, Any]]) -> Iterator[tuple[Labels, float]]:
    for labels, value in values:
        match value:
            case None:
                continue
            case str():
                yield (*labels, value), 1.0
            case Mapping():
                for key, number in value.items():
                    yield (*labels, *(key if isinstance(key, tuple) else (str(key),))), float(number)
            case _:
                yield labels, float(value)


def _buckets(value: Distribution) -> list[tuple[str, float]]:
    bounds = map(floatToGoString, (*value.bounds, inf))
    return list(zip(bounds, map(float, value.cumulative()), strict=True))
