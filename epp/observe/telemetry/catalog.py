"""Lists the classes that declare metrics (`base.metric`), finds their objects, and makes the families for
Prometheus of them.

To add a metric, add a field to one of these classes, declared as `base.metric` says, and a line that fills
the field in.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import inf
from typing import Any, Final

from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from epp.base.metric import Metric
from epp.observe.telemetry.counts import Distribution, ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus, SharingStatus
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """The metrics of one class. Each object of the class comes with the values of `labels`."""

    title: str
    of: type
    labels: Labels = ()

    def metrics(self) -> Iterator[tuple[str, Metric]]:
        """Yield the declared metrics by field, in the class's order. The object's labels come first."""
        for each in fields(self.of):
            metric = each.metadata.get("metric")
            if metric is not None:
                yield each.name, replace(metric, labels=(*self.labels, *metric.labels))


GROUPS: Final = (
    MetricGroup("Requests", RequestCounts),
    MetricGroup(
        "Requests, by endpoint (from 0 again when the endpoint comes back)", ServerCounts, ("endpoint",)
    ),
    MetricGroup("Endpoints", EndpointStatus, ("endpoint",)),
    MetricGroup("Pools, for autoscalers", PoolStatus, ("model", "pool")),
    MetricGroup("Flow control", FlowStatus, ("model",)),
    MetricGroup("The picker", PickerStatus),
    MetricGroup("The picker's process, files and API server", ProcessCounts),
    MetricGroup("Sharing, only where pickers share", SharingStatus),
    MetricGroup("Exact mode, only where it is on", ExactStatus),
    MetricGroup("Exact mode, by base model", ExactModelStatus, ("model",)),
    MetricGroup("Exact mode, by endpoint", ExactServerStatus, ("endpoint",)),
)

METRICS: Final[tuple[Metric, ...]] = tuple(metric for group in GROUPS for _, metric in group.metrics())


def objects(status: PickerStatus) -> Iterator[tuple[Labels, object]]:
    """Yield every object of the status that has metrics, with the values of its group's labels."""
    exact = status.exact
    yield from (((), each) for each in (status, status.sharing, exact) if each is not None)
    for pool in pools_of(status.endpoints, status.flow, unserved=status.unserved, goal_s=status.goal_s):
        yield (pool.model, pool.pool), pool
    yield from (((endpoint.name,), endpoint) for endpoint in status.endpoints)
    yield from (((flow.model,), flow) for flow in status.flow)
    if exact is not None:
        yield from named(exact.models)
        yield from named(exact.servers)


def named(things: Mapping[Any, object]) -> Iterator[tuple[Labels, object]]:
    """Yield the objects of a mapping, each with its name as the value of its label."""
    return (((name,), thing) for name, thing in things.items())


def families(
    found: Iterable[tuple[Labels, object]], *, groups: Iterable[MetricGroup] = GROUPS
) -> Iterator[Family]:
    """Yield each metric that has objects, with its current values."""
    rows = defaultdict(list)
    for labels, thing in found:
        rows[type(thing)].append((labels, thing))
    for group in groups:
        for name, metric in group.metrics() if group.of in rows else ():
            base = metric.name.removesuffix("_total")
            family = Family(base, metric.help, metric.kind)
            for labels, thing in rows[group.of]:
                for ending, names, values, number in _samples(metric, labels, getattr(thing, name)):
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
                keys = key if isinstance(key, tuple) else (str(key),)
                yield ending, metric.labels, (*labels, *keys), float(number)
        case Distribution():
            counted = list(accumulate(value.counts))
            for bound, count in zip(map(floatToGoString, (*value.bounds, inf)), counted, strict=True):
                yield "_bucket", (*metric.labels, "le"), (*labels, bound), float(count)
            yield "_count", metric.labels, labels, float(counted[-1])
            yield "_sum", metric.labels, labels, value.total
        case _:
            yield ending, metric.labels, labels, float(value)
