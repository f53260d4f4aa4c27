"""Lists the classes that declare metrics (`base.metric`), says where their objects are, and makes the
reference page and the pages for Prometheus of them.

To add a metric, add a field to one of these classes, declared as `base.metric` says, and a line that fills
the field in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Final, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from epp.base.metric import Metric
from epp.base.types import EndpointName
from epp.observe.telemetry import picker_state
from epp.observe.telemetry.counts import Distribution, ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus

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


@dataclass(frozen=True, slots=True)
class ShownClass:
    """Everything that Prometheus may read: the counts and the current state."""

    requests: RequestCounts
    servers: Mapping[EndpointName, ServerCounts]
    process: ProcessCounts
    status: picker_state.PickerStatus


def _pools(shown: ShownClass) -> Rows:
    status = shown.status
    return [
        ((p.model, p.pool), p)
        for p in pools_of(status.endpoints, status.flow, unserved=status.unserved, goal_s=status.goal_s)
    ]


def _one(thing: object | None) -> Rows:
    return [] if thing is None else [((), thing)]


def _named(things: Mapping[Any, object]) -> Rows:
    return [((name,), thing) for name, thing in things.items()]


GROUPS: Final[tuple[MetricGroup[ShownClass], ...]] = (
    MetricGroup("Requests", RequestCounts, lambda s: _one(s.requests)),
    MetricGroup("Requests, by endpoint", ServerCounts, lambda s: _named(s.servers), ("endpoint",)),
    MetricGroup(
        "Endpoints",
        picker_state.EndpointStatus,
        lambda s: [((e.name,), e) for e in s.status.endpoints],
        ("endpoint",),
    ),
    MetricGroup("Pools, for autoscalers", PoolStatus, _pools, ("model", "pool")),
    MetricGroup("Flow control", FlowStatus, lambda s: [((f.model,), f) for f in s.status.flow], ("model",)),
    MetricGroup("The picker", picker_state.PickerStatus, lambda s: _one(s.status)),
    MetricGroup("The picker's process, files and API server", ProcessCounts, lambda s: _one(s.process)),
    MetricGroup(
        "Sharing, only where pickers share", picker_state.SharingStatus, lambda s: _one(s.status.sharing)
    ),
    MetricGroup("Exact mode, only where it is on", ExactStatus, lambda s: _one(s.status.exact)),
    MetricGroup(
        "Exact mode, by base model",
        ExactModelStatus,
        lambda s: _named(s.status.exact.models if s.status.exact else {}),
        ("model",),
    ),
    MetricGroup(
        "Exact mode, by endpoint",
        ExactServerStatus,
        lambda s: _named(s.status.exact.servers if s.status.exact else {}),
        ("endpoint",),
    ),
)

METRICS: Final[tuple[Metric, ...]] = tuple(metric for group in GROUPS for _, metric in group.metrics())
_INTRO: Final = """\
# Metrics

The picker serves these metrics at `/metrics` on the admin address, in the text format of Prometheus. Each
worker process has a page of its own. Each page also has the metrics `process_*`: CPU seconds, memory, open
files and start time of the process.
"""


def metrics_reference() -> str:
    """Return the metrics reference page."""
    sections = (_section(group.title, (metric for _, metric in group.metrics())) for group in GROUPS)
    return "\n".join([_INTRO, *(line for section in sections for line in section)])


def _section(title: str, metrics: Iterable[Metric]) -> list[str]:
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or '-'} | {m.help} |"
        for m in metrics
    ]
    return [f"## {title}\n", "| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""]


# -- the page ------------------------------------------------------------------------------------------------


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
