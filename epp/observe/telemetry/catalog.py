"""Lists the classes that declare metrics, says where their objects are, and makes the reference page of them.

To add a metric, add a field to one of these classes, declared as `base.metric` says, and a line that fills
the field in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from epp.base.metric import Metric
from epp.base.types import EndpointName
from epp.observe.telemetry import picker_state
from epp.observe.telemetry.counts import ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.exposition import MetricGroup, Rows
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.flow.status import FlowStatus
from epp.picker.prefix_index.exact_status import ExactModelStatus, ExactServerStatus, ExactStatus


@dataclass(frozen=True, slots=True)
class ShownClass:
    """Everything that Prometheus may read: the counts and the current state."""

    requests: RequestCounts
    servers: Mapping[EndpointName, ServerCounts]
    process: ProcessCounts
    status: picker_state.PickerStatus


def _pools(shown: ShownClass) -> Rows:
    status = shown.status
    return [((p.model, p.pool), p) for p in pools_of(status.endpoints, status.flow, goal_s=status.goal_s)]


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
