"""Counts what happens, for Prometheus: listens to the picker's events. Lists the classes that declare metrics
(`base.metric`), finds their objects, and makes the page of them.

State that the picker already holds is not counted a second time but read when Prometheus asks, through the
callable given by the composition root. Also logs the requests that an operator should see, by request id and
never with text of a prompt.

To add a metric, add a field to one of these classes, declared as `base.metric` says, and a line that fills
the field in.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain
from math import inf
from typing import Any, Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from epp.base.errors import PickError
from epp.base.metric import Metric
from epp.base.types import EndpointName
from epp.observe.telemetry.counts import Distribution, ProcessCounts, RequestCounts, ServerCounts
from epp.observe.telemetry.decisions import DecisionRing, RefusalRecord
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus, StatusSource
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.decision import Decision
from epp.picker.events import (
    Answered,
    Began,
    Cut,
    Ended,
    Pick,
    PickerEvent,
    ProtocolFault,
    Proved,
    Refused,
)
from epp.picker.flow.accounts import FlowStatus
from epp.picker.prefix_index.reported import ExactModelStatus, ExactServerStatus, ExactStatus
from epp.sources.sharing_status import SharingStatus

_log = logging.getLogger("epp.requests")

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


def objects(status: PickerStatus) -> Iterator[tuple[Labels, object]]:
    """Yield every object of the status that has metrics, with the values of its group's labels."""
    exact = status.exact
    yield from (((), each) for each in (status, status.sharing, exact) if each is not None)
    for pool in pools_of(status):
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


# -- what happens --------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Metrics:
    """Listens with `on_event`."""

    decisions: DecisionRing
    """Every decision and refusal is added to it."""
    state: StatusSource
    unix_clock: Callable[[], float] = time.time
    timer: Callable[[], float] = time.perf_counter
    """The same timer as the streams'."""

    process: ProcessCounts = field(init=False, default_factory=ProcessCounts)
    """The loops of the picker write into it."""
    _requests: RequestCounts = field(init=False, default_factory=RequestCounts)
    _servers: defaultdict[EndpointName, ServerCounts] = field(
        init=False, default_factory=lambda: defaultdict(ServerCounts)
    )
    _of_python: ProcessCollector = field(init=False, default_factory=lambda: ProcessCollector(registry=None))

    def on_event(self, event: PickerEvent) -> None:
        if type(event) is Began:
            self._began(event)
        elif type(event) is Proved and isinstance(event.work, Pick):
            # a prompt counts only if its server has computed it
            self._requests.prompt_tokens += event.work.decision.prompt_tokens
            self._requests.matched_tokens += event.work.decision.matched_tokens
        elif type(event) is Answered:
            self._answered(event.pick.decision, mismatch=event.mismatch)
        elif type(event) is Ended:
            self._ended(event.pick.decision)
        elif type(event) is Refused:
            self._refused(event.request_id, event.error)
        elif type(event) is Cut:
            self._servers[event.server.endpoint.name].cut += 1
        elif type(event) is ProtocolFault:
            self._requests.protocol_errors[event.reason] += 1

    def _began(self, event: Began) -> None:
        decision, counts = event.pick.decision, self._requests
        counts.in_flight += 1
        counts.pick_seconds.observe(event.picked_in_s(timer_s=self.timer()))
        self._servers[decision.chosen].picks[decision.reason] += 1
        if decision.prefill is not None:
            helper = self._servers[decision.prefill.name]
            helper.prefill_picks += 1
            helper.prefill_tokens += decision.prefill.uncached_tokens
        if decision.waited_s:
            counts.flow_waited.observe(decision.waited_s)
        if decision.unread:
            counts.unread[decision.unread] += 1
        if decision.dry_run is not None:
            counts.dry_run[decision.dry_run.policy, str(decision.dry_run.agrees).lower()] += 1
        self.decisions.append(decision)

    def _answered(self, decision: Decision, *, mismatch: bool) -> None:
        server = self._servers[decision.served_by]
        server.answers[_class_of(decision.status)] += 1
        if decision.headers_s is not None:
            server.headers_s += decision.headers_s
        if mismatch:
            self._requests.mismatches += 1

    def _ended(self, decision: Decision) -> None:
        if decision.outcome == "failed":
            extra = {
                "request_id": decision.request_id,
                "served": str(decision.served),
                "status": decision.status,
            }
            _log.warning("the model server failed", extra=extra)
        counts = self._requests
        counts.in_flight -= 1
        counts.requests[decision.outcome or "ended", decision.kind] += 1
        if decision.cached_tokens is not None:
            counts.sampled_predicted += decision.matched_tokens
            counts.sampled_cached += decision.cached_tokens
        if decision.ttft_s is not None:
            counts.sampled_ttft.observe(decision.ttft_s)
            counts.sampled_predicted_s += decision.predicted_s

    def _refused(self, request_id: str, error: PickError) -> None:
        level = logging.WARNING if error.status >= 500 else logging.INFO
        extra = {"request_id": request_id, "status": error.status, "reason": error.reason}
        _log.log(level, "refused: %s", error, extra=extra)
        self._requests.requests["refused", "unknown"] += 1
        self._requests.refused[error.reason] += 1
        self.decisions.append(
            RefusalRecord(
                request_id=request_id,
                at_unix_s=self.unix_clock(),
                status=error.status,
                reason=error.reason,
                message=str(error),
            )
        )

    def keep(self, present: AbstractSet[EndpointName]) -> None:
        """Forget the counts of all other endpoints, because they are gone."""
        for name in self._servers.keys() - present:
            del self._servers[name]

    def collect(self) -> Iterator[Family]:
        status = self.state()
        self.keep({endpoint.name for endpoint in status.endpoints})
        counted = [((), self._requests), ((), self.process), *named(self._servers)]
        yield from families(chain(counted, objects(status)))
        yield from self._of_python.collect()

    def pieces(self) -> Iterator[bytes]:
        """Yield the page, one metric at a time. The whole page takes 0.1 s for a thousand servers, which is
        too long for one turn of the event loop.
        """
        for family in self.collect():
            yield generate_latest(_Only(family))


@dataclass(frozen=True)
class _Only(Collector):
    family: Family

    def collect(self) -> list[Family]:
        return [self.family]


def _class_of(status: int | None) -> str:
    """Return 404 or 429 for these statuses, and else the class of the first digit. The data plane makes sure
    that there are only a few first digits.
    """
    if status in (404, 429):
        return str(status)
    return f"{(status or 0) // 100}xx"
