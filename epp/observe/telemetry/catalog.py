"""Lists the classes that declare metrics (`base.metric`), says where their objects are, and makes the
families for Prometheus of them.

To add a metric, add a field to one of these classes, declared as `base.metric` says, and a line that fills
the field in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Final

from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from epp.base.metric import Metric
from epp.observe.telemetry.counts import Distribution, EventCounts, ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus, SharingStatus
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, object]]


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """The metrics of one class. `rows` finds the objects of this class, each with the values of `labels`."""

    title: str
    of: type
    rows: Callable[[EventCounts, PickerStatus], Rows]
    labels: Labels = ()

    def metrics(self) -> Iterator[tuple[str, Metric]]:
        """Yield the declared metrics by field, in the class's order. The object's labels come first."""
        for each in fields(self.of):
            metric = each.metadata.get("metric")
            if metric is not None:
                yield each.name, replace(metric, labels=(*self.labels, *metric.labels))


def _pools(_: EventCounts, status: PickerStatus) -> Rows:
    found = pools_of(status.endpoints, status.flow, unserved=status.unserved, goal_s=status.goal_s)
    return [((pool.model, pool.pool), pool) for pool in found]


def _one(thing: object | None) -> Rows:
    return [] if thing is None else [((), thing)]


def _named(things: Mapping[Any, object]) -> Rows:
    return [((name,), thing) for name, thing in things.items()]


GROUPS: Final = (
    MetricGroup("Requests", RequestCounts, lambda counts, _: _one(counts.requests)),
    MetricGroup(
        "Requests, by endpoint", ServerCounts, lambda counts, _: _named(counts.servers), ("endpoint",)
    ),
    MetricGroup(
        "Endpoints",
        EndpointStatus,
        lambda _, status: _named({e.name: e for e in status.endpoints}),
        ("endpoint",),
    ),
    MetricGroup("Pools, for autoscalers", PoolStatus, _pools, ("model", "pool")),
    MetricGroup(
        "Flow control", FlowStatus, lambda _, status: _named({f.model: f for f in status.flow}), ("model",)
    ),
    MetricGroup("The picker", PickerStatus, lambda _, status: _one(status)),
    MetricGroup(
        "The picker's process, files and API server", ProcessCounts, lambda counts, _: _one(counts.process)
    ),
    MetricGroup("Sharing, only where pickers share", SharingStatus, lambda _, status: _one(status.sharing)),
    MetricGroup("Exact mode, only where it is on", ExactStatus, lambda _, status: _one(status.exact)),
    MetricGroup(
        "Exact mode, by base model",
        ExactModelStatus,
        lambda _, status: _named(status.exact.models if status.exact else {}),
        ("model",),
    ),
    MetricGroup(
        "Exact mode, by endpoint",
        ExactServerStatus,
        lambda _, status: _named(status.exact.servers if status.exact else {}),
        ("endpoint",),
    ),
)

METRICS: Final[tuple[Metric, ...]] = tuple(metric for group in GROUPS for _, metric in group.metrics())


def families(
    counts: EventCounts, status: PickerStatus, *, groups: Iterable[MetricGroup] = GROUPS
) -> Iterator[Family]:
    """Yield each metric that has objects, with its current values."""
    for group in groups:
        rows = list(group.rows(counts, status))
        for name, metric in group.metrics() if rows else ():
            base = metric.name.removesuffix("_total")
            family = Family(base, metric.help, metric.kind)
            for labels, row in rows:
                for ending, names, values, number in _samples(metric, labels, getattr(row, name)):
                    family.add_sample(base + ending, dict(zip(names, values, strict=True)), number)
            yield family


def _samples(metric: Metric, labels: Labels, value: Any) -> Iterator[tuple[str, Labels, Labels, float]]:
    """Yield the end of each sample's name, the names and values of its labels, and its number."""
    ending = "_total" if metric.kind == "counter" else ""
    match value:
        case None:
            return
        case str():
            yield ending, metric.labels, (*labels, value), 1.0
        case Mapping():
            for key, number in value.items():
                yield (
                    ending,
                    metric.labels,
                    (*labels, *(key if isinstance(key, tuple) else (str(key),))),
                    float(number),
                )
        case Distribution():
            counted = value.cumulative()
            for bound, count in zip(map(floatToGoString, (*value.bounds, inf)), counted, strict=True):
                yield "_bucket", (*metric.labels, "le"), (*labels, bound), float(count)
            yield "_count", metric.labels, labels, float(counted[-1])
            yield "_sum", metric.labels, labels, value.total
        case _:
            yield ending, metric.labels, labels, float(value)
