"""Which picks have a span, its parent and attributes, and OpenTelemetry's own variables."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    DEFAULT_ON,
    Sampler,
)

from epp.base.errors import ConfigError
from epp.base.types import EndpointName
from epp.observe.tracing import start
from epp.observe.tracing.start import processor_of
from epp.observe.tracing.tracer import Tracer, attributes_of, error_of
from epp.picker.events import Pick
from tests.unit.observe.telemetry.records import HERE, THERE, began, decision, ended, pick

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


CALLER = f"00-{TRACE:032x}-{SPAN:016x}-01"
UNSAMPLED = f"00-{TRACE:032x}-{SPAN:016x}-00"


AT = 1_700_000_000.0


class Traces:
    """A tracer that keeps its spans, or sends them to `collector`. `arrived` ends the tracer."""

    def __init__(self, sampler: Sampler = DEFAULT_ON, collector: SpanExporter | None = None) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(sampler, Resource({"service.name": "s"}), shutdown_on_exit=False)
        self.tracer = Tracer(provider, processor_of(collector or self._kept), timer=lambda: 0.0)

    def one(self, made: Pick | None = None, *, trace: str = "", seconds: float = 0.0) -> Pick:
        """Route one request and end it."""
        made = made or pick()
        self.tracer.on_event(began(made, trace=trace, began_s=-seconds - made.decision.waited_s))
        self.tracer.on_event(ended(made))
        return made

    def arrived(self) -> list[ReadableSpan]:
        self.tracer.processor.shutdown()  # type: ignore[no-untyped-call]
        return list(self._kept.get_finished_spans())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_span_has_attributes_of_request_prediction_and_outcome() -> None:
    traces = Traces()
    shown = decision(request_id="r7", model="base", prompt_tokens=1000, matched_tokens=600)
    made = pick(shown)
    traces.tracer.on_event(began(made, trace=CALLER, began_s=-0.002))
    shown.waited_s, shown.served, shown.status, shown.outcome = 1.5, THERE, 200, "ended"
    shown.headers_s, shown.ttft_s, shown.cached_tokens = 0.25, 0.75, 512
    traces.tracer.on_event(ended(made))
    (span,) = traces.arrived()
    assert attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "base",
        "gen_ai.usage.cache_read.input_tokens": 512,
        "http.response.status_code": 200,
        "server.address": "fd00::2",
        "server.port": 8000,
        "prefix_gateway.request_id": "r7",
        "prefix_gateway.rule": "least-cost",
        "prefix_gateway.policy": "default",
        "prefix_gateway.reason": "prefix",
        "prefix_gateway.endpoint": "a",
        "prefix_gateway.prompt_tokens": 1000,
        "prefix_gateway.matched_tokens": 600,
        "prefix_gateway.predicted_first_token_seconds": (50 + 400) / 8000,
        "prefix_gateway.score_seconds": 0.125,
        "prefix_gateway.queue_seconds": 1.5,
        "prefix_gateway.headers_seconds": 0.25,
        "prefix_gateway.first_token_seconds": 0.75,
        "prefix_gateway.outcome": "ended",
    }
    assert span.status.is_ok
    assert span.resource.attributes["service.name"] == "s"


def test_a_span_lasts_from_arrival_to_pick_with_the_time_in_the_queue() -> None:
    traces = Traces()
    made = decision()
    made.waited_s = 2.0
    traces.one(pick(made), seconds=0.5)
    (span,) = traces.arrived()
    assert (span.start_time, span.end_time) == (int((AT - 2.0) * 1e9), int((AT + 0.5) * 1e9))


def test_span_is_the_child_of_the_callers_and_the_decision_names_its_trace() -> None:
    traces = Traces()
    made = traces.one(trace=CALLER)
    (span,) = traces.arrived()
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id, span.parent.is_remote) == (TRACE, SPAN, True)
    assert span.context.span_id != SPAN
    assert made.decision.trace_id == f"{TRACE:032x}"


@pytest.mark.parametrize("trace", ["", "nonsense", CALLER + "-x", CALLER.upper(), "00-" + "0" * 52])
def test_without_a_readable_context_a_span_begins_a_new_trace(trace: str) -> None:
    traces = Traces()
    traces.one(trace=trace)
    (span,) = traces.arrived()
    assert span.parent is None
    assert span.context is not None
    assert span.context.trace_id not in (0, TRACE)


@pytest.mark.parametrize(("sampler", "spans"), [(DEFAULT_ON, 0), (ALWAYS_ON, 1)])
def test_the_caller_decides_unless_the_sampler_ignores_the_parent(sampler: Sampler, spans: int) -> None:
    traces = Traces(sampler)
    made = traces.one(trace=UNSAMPLED)
    assert len(traces.arrived()) == spans
    assert bool(made.decision.trace_id) == bool(spans)


def test_a_failed_request_is_an_error_in_its_trace() -> None:
    traces = Traces()
    made = decision()
    made.status, made.outcome = 503, "failed"
    traces.one(pick(made))
    (span,) = traces.arrived()
    assert attributes(span)["error.type"] == "503"
    assert not span.status.is_ok


def test_the_tracer_keeps_no_decision_of_ended_requests() -> None:
    traces = Traces()
    kept = pick()
    before = sys.getrefcount(kept.decision)
    for _ in range(10):
        traces.one(kept, trace=CALLER)
    assert len(traces.arrived()) == 10
    after = sys.getrefcount(kept.decision)
    assert after == before


PAGE = Path("docs/tracing.md").read_text()


def test_unknown_values_are_left_out() -> None:
    found = attributes_of(decision(model=""))
    assert (found["server.address"], found["server.port"]) == (HERE.host, HERE.port)
    assert not {"gen_ai.request.model", "http.response.status_code", "error.type"} & found.keys()
    assert "prefix_gateway.first_token_seconds" not in found
    assert all(value is not None for value in found.values())


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("chat", "chat"), ("completions", "text_completion"), ("embeddings", "embeddings"), ("score", "score")],
)
def test_the_operation_has_the_name_of_the_conventions_or_else_our_own(kind: str, operation: str) -> None:
    made = decision()
    made.kind = kind
    assert attributes_of(made)["gen_ai.operation.name"] == operation


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [
        (200, "ended", ""),
        (404, "ended", ""),
        (500, "ended", "500"),
        (None, "failed", "failed"),
        (200, "aborted", ""),
    ],
)
def test_only_faults_of_servers_are_errors(status: int | None, outcome: str, error: str) -> None:
    made = decision()
    made.status, made.outcome = status, outcome
    assert error_of(made) == error


def test_every_attribute_is_documented() -> None:
    made = decision(adapter="sql")
    made.served, made.served_by, made.status, made.outcome = THERE, EndpointName("other"), 503, "failed"
    made.headers_s, made.ttft_s, made.cached_tokens, made.unread = 0.1, 0.2, 5, "encoded_body"
    names = attributes_of(made).keys()
    # The page shortens a second name of a row to its last part.
    shown = {
        name for name in names if f"`{name}`" in PAGE or f"`.{name.removeprefix('prefix_gateway.')}`" in PAGE
    }
    assert names - shown == set()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, True),
        ({"OTEL_SDK_DISABLED": " TRUE "}, False),
        ({"OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_the_environment_may_turn_off_what_the_configuration_turns_on(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *, on: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start.on(True) is on
    assert start.on(False) is False


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("OTEL_TRACES_EXPORTER", "jaeger", "'jaeger' is not known here; set otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier", "set one of grpc, http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier", "set one of grpc, http/protobuf"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_before_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, fault: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"tracing: {name}: .*{fault}") as caught:
        start.require(True)
    assert len(str(caught.value)) < 200


def test_invalid_variables_are_ignored_if_tracing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "none")
    start.require(False)


def test_bounds_that_the_batch_processor_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match=r"tracing: OTEL_BSP_.*max_queue_size must be"):
        start.processor_of(PatientCollector())


def test_importing_this_module_loads_nothing_of_opentelemetry() -> None:
    code = "import epp.observe.tracing.start, sys; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


class PatientCollector(SpanExporter):
    """Answers a batch when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.free.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.free.set()


async def test_tracing_stops_although_the_collector_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    collector = PatientCollector()
    traces = Traces(collector=collector)
    traces.one()
    assert collector.asked.wait(10)
    await start.stop(traces.tracer.processor)
    assert collector.free.is_set(), "the sending was ended"
