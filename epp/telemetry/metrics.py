"""Counts what happens, for Prometheus: listens to the picker's events, and is the streams' `Observer`.

Owns a registry of its own, nothing global. On the request path an event is a few additions to plain numbers (`counting`);
children of labels are found once and kept. State that the picker already holds is not counted a second time but read when Prometheus asks, through
the callable given by the composition root; series of endpoints that are gone go with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.decision import Decision, Pick
from epp.errors import PickError
from epp.gate import FlowStatus
from epp.picker_events import Answered, Ended, PickerEvent
from epp.telemetry import catalog, request_log
from epp.telemetry.catalog import Spec
from epp.telemetry.counting import Counts
from epp.telemetry.decisions import DecisionRing, Refusal
from epp.telemetry.pool import PoolStatus, pools_of
from epp.telemetry.state import EndpointStatus, ExactStatus, PickerStatus, SharingStatus, StatusSource
from epp.types import EndpointName

_C = TypeVar("_C")


class _Children(dict[tuple[str, ...], _C], Generic[_C]):
    """Children by label values, looked up once. Only for labels from small fixed sets."""

    def __init__(self, labels: Callable[..., _C]) -> None:
        super().__init__()
        self._labels = labels

    def __missing__(self, key: tuple[str, ...]) -> _C:
        child = self[key] = self._labels(*key)
        return child


class Metrics:
    """Implements `epp.decision.Observer`, and listens by `hear`; every decision also goes to `decisions`."""

    def __init__(
        self, *, decisions: DecisionRing, state: StatusSource, unix_clock: Callable[[], float] = time.time
    ) -> None:
        self._decisions = decisions
        self._unix_clock = unix_clock
        self.registry = registry = CollectorRegistry()
        self._refused = _Children(_counter(catalog.REFUSED, registry).labels)
        self._protocol_errors = _Children(_counter(catalog.PROTOCOL_ERRORS, registry).labels)
        self._reloads = _Children(_counter(catalog.RELOADS, registry).labels)
        self._reload_ok = _Children(_gauge(catalog.RELOAD_OK, registry).labels)
        self._dry_run = _Children(_counter(catalog.DRY_RUN, registry).labels)
        self._followed = _Children(_gauge(catalog.FOLLOWED, registry).labels)
        self._policies = _Children(_gauge(catalog.POLICIES, registry).labels)
        self._lease_held = _gauge(catalog.LEASE_HELD, registry)
        counts = Counts(unix_clock=unix_clock)
        self._requests = counts.labelled(catalog.REQUESTS)
        self._unread = counts.labelled(catalog.UNREAD_BODIES)
        self._in_flight = counts.number(catalog.IN_FLIGHT)
        self._pick_seconds = counts.distribution(catalog.PICK_SECONDS)
        self._parse_seconds = counts.distribution(catalog.PARSE_SECONDS)
        self._parsed_bytes = counts.number(catalog.PARSED_BYTES)
        self._prompt_tokens = counts.number(catalog.PROMPT_TOKENS)
        self._matched_tokens = counts.number(catalog.MATCHED_TOKENS)
        self._tasks = counts.number(catalog.TASKS)
        self._flow_waited = counts.distribution(catalog.FLOW_WAITED)
        self._loop_lag = counts.distribution(catalog.LOOP_LAG)
        registry.register(counts)
        self._sampled_predicted = _counter(catalog.SAMPLED_PREDICTED, registry)
        self._sampled_cached = _counter(catalog.SAMPLED_CACHED, registry)
        self._sampled_true = _counter(catalog.SAMPLED_TRUE, registry)
        self._sampled_ttft = _histogram(catalog.SAMPLED_TTFT, registry)
        self._mismatches = _counter(catalog.MISMATCHES, registry)
        self._picks: dict[tuple[EndpointName, str], float] = {}
        self._prefill_picks: dict[tuple[EndpointName], float] = {}
        self._prefill_tokens: dict[tuple[EndpointName], float] = {}
        self._answers: dict[tuple[EndpointName, str], float] = {}
        self._headers_s: dict[tuple[EndpointName], float] = {}
        by_endpoint: dict[Spec, dict[Any, float]] = {
            catalog.PICKS: self._picks,
            catalog.PREFILL_PICKS: self._prefill_picks,
            catalog.PREFILL_TOKENS: self._prefill_tokens,
            catalog.ANSWERS: self._answers,
            catalog.HEADERS_SECONDS: self._headers_s,
        }
        registry.register(_StateCollector(state, by_endpoint))
        ProcessCollector(registry=registry)

    def parsed(self, *, seconds: float, size_bytes: int) -> None:
        self._parse_seconds.observe(seconds)
        self._parsed_bytes.value += size_bytes

    def picked(self, pick: Pick, *, seconds: float, trace: str = "") -> None:  # noqa: ARG002 - for tracing
        decision = pick.decision
        self._in_flight.value += 1
        self._pick_seconds.observe(seconds)
        self._prompt_tokens.value += decision.prompt_tokens
        self._matched_tokens.value += decision.matched_tokens
        key = (decision.chosen, decision.reason)
        self._picks[key] = self._picks.get(key, 0) + 1
        if decision.prefill is not None:
            helper = (decision.prefill.name,)
            self._prefill_picks[helper] = self._prefill_picks.get(helper, 0) + 1
            self._prefill_tokens[helper] = (
                self._prefill_tokens.get(helper, 0) + decision.prefill.uncached_tokens
            )
        if decision.waited_s:
            self._flow_waited.observe(decision.waited_s)
        if decision.unread:
            self._unread.add((decision.unread,))
        if decision.dry_run is not None:
            self._dry_run[decision.dry_run.policy, str(decision.dry_run.agrees).lower()].inc()
        self._decisions.add(decision)
        request_log.picked(decision)

    def refused(self, request_id: str, error: PickError, *, trace: str = "") -> None:  # noqa: ARG002 - as above
        request_log.refused(request_id, error)
        self._requests.add(("refused", "unknown"))
        self._refused[error.reason,].inc()
        self._decisions.add(
            Refusal(
                request_id=request_id,
                at_unix_s=self._unix_clock(),
                status=error.status,
                reason=error.reason,
                message=str(error),
            )
        )

    def hear(self, event: PickerEvent) -> None:
        """What becomes of requests after their picks."""
        match event:
            case Answered():
                self._answered(event.request.decision, mismatch=event.mismatch)
            case Ended():
                self._ended(event.request.decision)

    def _answered(self, decision: Decision, *, mismatch: bool) -> None:
        answer = decision.served_by, _class_of(decision.status)
        self._answers[answer] = self._answers.get(answer, 0) + 1
        if decision.headers_s is not None:
            key = (decision.served_by,)
            self._headers_s[key] = self._headers_s.get(key, 0.0) + decision.headers_s
        if mismatch:
            self._mismatches.inc()
            request_log.moved(decision)

    def _ended(self, decision: Decision) -> None:
        request_log.ended(decision)
        self._in_flight.value -= 1
        self._requests.add((decision.outcome or "ended", decision.kind))
        if decision.cached_tokens is not None:
            self._sampled_predicted.inc(decision.matched_tokens)
            self._sampled_cached.inc(decision.cached_tokens)
            self._sampled_true.inc(min(decision.matched_tokens, decision.cached_tokens))
        if decision.ttft_s is not None:
            self._sampled_ttft.observe(decision.ttft_s)

    def protocol_error(self, reason: str) -> None:
        self._protocol_errors[reason,].inc()

    def has_tasks(self, count: int) -> None:
        """So many tasks are on the event loop."""
        self._tasks.value = count

    def lagged(self, seconds: float) -> None:
        """How late the event loop was."""
        self._loop_lag.observe(seconds)

    def watching(self, source: str) -> None:
        """A file was read at start and is watched from now on."""
        self._reload_ok[source,].set(1)

    def reloaded(self, source: str, *, ok: bool) -> None:
        """A watched file changed; `source` says which: policy, endpoints."""
        self._reloads[source, "accepted" if ok else "refused"].inc()
        self._reload_ok[source,].set(ok)

    def followed(self, resource: str, answers: bool) -> None:  # noqa: FBT001 - one of the cluster's hooks
        """Whether the API server lets us follow pods, pool or policies."""
        self._followed[resource,].set(answers)

    def judged(self, accepted: int, refused: int) -> None:
        """The pool's policies, by what became of them."""
        self._policies["accepted",].set(accepted)
        self._policies["refused",].set(refused)

    def lease_held(self, held: bool) -> None:  # noqa: FBT001 - one of the cluster's hooks
        """Whether this process writes the status of policies."""
        self._lease_held.set(held)

    def page(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    """The picker's state as metrics, and what is counted by endpoint, which lives as long as its endpoint."""

    def __init__(self, state: StatusSource, by_endpoint: Mapping[Spec, dict[Any, float]]) -> None:
        """by_endpoint: counts by their labels, of which the endpoint is the first."""
        self._state = state
        self._by_endpoint = by_endpoint

    def describe(self) -> Iterable[Metric]:
        """Without this, registering would ask for state that is not there yet."""
        return [_family(spec) for spec in (*catalog.STATE, *self._by_endpoint)]

    def collect(self) -> Iterator[Metric]:
        status = self._state()
        present = {e.name for e in status.endpoints}
        for spec, counts in self._by_endpoint.items():
            for key in [key for key in counts if key[0] not in present]:
                del counts[key]
            yield _family(spec, *counts.items())
        yield _family(catalog.POLICY, ((status.policy, status.rule), 1.0))
        yield _family(catalog.DRAINING, ((), float(status.draining)))
        yield _family(catalog.HELD_BODIES, ((), float(status.held_body_bytes)))
        yield _family(catalog.OVERLOAD, ((), status.overload_ratio))
        yield from _flow_families(status.flow)
        yield from _pool_families(pools_of(status.endpoints, status.flow, goal_s=status.goal_s))
        failures = (((source,), float(count)) for source, count in status.source_failures.items())
        yield _family(catalog.SOURCE_FAILURES, *failures)
        left_out = (((reason,), float(count)) for reason, count in status.log_lines_left_out.items())
        yield _family(catalog.LOG_LINES_LEFT_OUT, *left_out)
        recorded = (((result,), float(count)) for result, count in status.recorded.items())
        yield _family(catalog.RECORDED, *recorded)
        yield _family(catalog.TABLE_TOTAL, ((), status.table_entries))
        yield from _endpoint_families(status)
        if status.spans:
            yield _family(catalog.TRACE_SPANS, *(((result,), float(n)) for result, n in status.spans.items()))
        if status.sharing is not None:
            yield from _sharing_families(status.sharing)
        if status.exact is not None:
            yield from _exact_families(status.exact)


def _flow_families(flows: Sequence[FlowStatus]) -> Iterator[Metric]:
    requests = (((f.model, str(p)), float(count)) for f in flows for p, count in f.requests.items())
    tokens = (((f.model, str(p)), float(count)) for f in flows for p, count in f.tokens.items())
    yield _family(catalog.FLOW_WAITING, *requests)
    yield _family(catalog.FLOW_WAITING_TOKENS, *tokens)
    shares = (((f.model, t), float(count)) for f in flows for t, count in f.let_go_tokens.items())
    yield _family(catalog.FLOW_LET_GO_TOKENS, *shares)
    yield _family(catalog.FLOW_DEMOTED, *(((f.model,), float(f.demoted)) for f in flows))
    yield _family(catalog.FLOW_OLDEST, *(((f.model,), f.oldest_s) for f in flows))
    yield _family(catalog.FLOW_SATURATION, *(((f.model,), f.saturation) for f in flows))


def _pool_families(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    yield _family(catalog.POOL_SERVERS, *(((pool.model,), float(pool.servers)) for pool in pools))
    yield _family(
        catalog.POOL_UNDONE,
        *(((pool.model, "servers"), pool.undone_s) for pool in pools),
        *(((pool.model, "queue"), pool.queued_s) for pool in pools),
    )
    yield _family(catalog.POOL_SATURATION, *(((pool.model,), pool.saturation) for pool in pools))


_PER_ENDPOINT: tuple[tuple[Spec, Callable[[EndpointStatus], float | None]], ...] = (
    (catalog.READY, lambda e: e.ready),
    (catalog.ENDPOINT_IN_FLIGHT, lambda e: e.in_flight),
    (catalog.PEERS_IN_FLIGHT, lambda e: e.peers_in_flight),
    (catalog.BACKLOG, lambda e: e.backlog_tokens),
    (catalog.PREFILL_RATE, lambda e: e.prefill_tokens_per_s),
    (catalog.RUNNING, lambda e: e.running),
    (catalog.WAITING, lambda e: e.waiting),
    (catalog.KV_USAGE, lambda e: e.kv_usage),
    (catalog.PREFIX_QUERIES, lambda e: e.prefix_queries_tokens),
    (catalog.PREFIX_HITS, lambda e: e.prefix_hits_tokens),
    (catalog.PREDICTED, lambda e: e.predicted_tokens),
    (catalog.CAPACITY, lambda e: e.capacity_tokens),
    (catalog.CACHE_SIZE, lambda e: e.cache_size_ratio),
    (catalog.BYTES_PER_TOKEN, lambda e: e.bytes_per_token),
    (catalog.SCRAPE_AGE, lambda e: e.scrape_age_s),
    (catalog.SCRAPE_OK, lambda e: e.scrape_age_s is not None and not e.scrape_error),
    (catalog.TABLE_ENTRIES, lambda e: e.table_entries),
    (catalog.TABLE_BYTES, lambda e: e.table_bytes),
    (catalog.TABLE_CAPACITY, lambda e: e.table_capacity_bytes),
    (catalog.EVICTIONS, lambda e: e.table_evictions),
    (catalog.FAILURE_SHARE, lambda e: e.failure_share),
    (catalog.LEFT_OUT, lambda e: bool(e.left_out)),
)


def _endpoint_families(status: PickerStatus) -> Iterator[Metric]:
    for spec, read in _PER_ENDPOINT:
        values = ((e.name, read(e)) for e in status.endpoints)
        yield _family(spec, *(((name,), float(value)) for name, value in values if value is not None))


def _sharing_families(sharing: SharingStatus) -> Iterator[Metric]:
    for spec, value in (
        (catalog.SHARING_CONNECTED, sharing.connected),
        (catalog.SHARING_PEERS, sharing.peers),
        (catalog.SHARING_WAITING, sharing.waiting_bytes),
        (catalog.SHARING_SAID_BATCHES, sharing.said_batches),
        (catalog.SHARING_SAID_BYTES, sharing.said_bytes),
        (catalog.SHARING_SAID_EVENTS, sharing.said_events),
        (catalog.SHARING_DROPPED, sharing.dropped_events),
        (catalog.SHARING_READ_BYTES, sharing.read_bytes),
        (catalog.SHARING_HEARD, sharing.heard_events),
        (catalog.SHARING_GAPS, sharing.gaps),
    ):
        yield _family(spec, ((), float(value)))
    for spec, counts in (
        (catalog.SHARING_SKIPPED, sharing.skipped),
        (catalog.SHARING_ERRORS, sharing.errors),
        (catalog.SHARING_TABLES, sharing.tables),
    ):
        yield _family(spec, *(((label,), float(count)) for label, count in counts.items()))


def _exact_families(exact: ExactStatus) -> Iterator[Metric]:
    models, servers = exact.models.items(), exact.servers.items()
    yield _family(catalog.EXACT_MODEL, *(((name, m.state), 1.0) for name, m in models))
    yield _family(
        catalog.EXACT_PROMPTS,
        *(((name, result), float(n)) for name, m in models for result, n in m.prompts.items()),
    )
    yield _family(catalog.EXACT_DROPPED, ((), float(exact.dropped_prompts)))
    yield _family(catalog.EXACT_ENDPOINT, *(((name, s.state), 1.0) for name, s in servers))
    yield _family(catalog.EXACT_BLOCKS, *(((name,), float(s.blocks)) for name, s in servers))
    yield _family(catalog.EXACT_CHUNKS, *(((name,), float(s.chunks)) for name, s in servers))
    yield _family(catalog.EXACT_EVENTS, *(((name,), float(s.events)) for name, s in servers))
    yield _family(catalog.EXACT_GAPS, *(((kind,), float(n)) for kind, n in exact.gaps.items()))
    yield _family(catalog.EXACT_MALFORMED, ((), float(exact.malformed)))
    yield _family(catalog.EXACT_CORRECTIONS, *(((kind,), float(n)) for kind, n in exact.corrections.items()))


def _class_of(status: int | None) -> str:
    """Of a status that a server sent. Strange ones go to the class of their first digit, which the data plane checks."""
    if status in (404, 429):
        return str(status)
    return f"{(status or 0) // 100}xx"


def _family(spec: Spec, *samples: tuple[tuple[str, ...], float]) -> CounterMetricFamily | GaugeMetricFamily:
    made = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = made(spec.name, spec.help, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _counter(spec: Spec, registry: CollectorRegistry) -> Counter:
    return Counter(spec.name, spec.help, spec.labels, registry=registry)


def _gauge(spec: Spec, registry: CollectorRegistry) -> Gauge:
    return Gauge(spec.name, spec.help, spec.labels, registry=registry)


def _histogram(spec: Spec, registry: CollectorRegistry) -> Histogram:
    return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets)
