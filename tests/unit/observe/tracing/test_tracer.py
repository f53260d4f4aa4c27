"""The picks that have a span, the parent of the span, and its content."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    DEFAULT_ON,
    Sampler,
)

from epp.observe.tracing.start import processor_of
from epp.observe.tracing.tracer import Tracer
from epp.picker.events import Pick
from tests.unit.observe.telemetry.records import THERE, began, decision, ended, pick

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
CALLER = f"00-{TRACE:032x}-{SPAN:016x}-01"
UNSAMPLED = f"00-{TRACE:032x}-{SPAN:016x}-00"
AT = 1_700_000_000.0


class Traces:
    """A tracer that keeps its spans. `arrived` ends the tracer."""

    def __init__(self, sampler: Sampler = DEFAULT_ON) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(sampler, Resource({"service.name": "s"}), shutdown_on_exit=False)
        self.tracer = Tracer(provider, processor_of(self._kept), timer=lambda: 0.0)

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
    told = decision(request_id="r7", model="base", prompt_tokens=1000, matched_tokens=600)
    made = pick(told)
    traces.tracer.on_event(began(made, trace=CALLER, began_s=-0.002))
    told.waited_s, told.served, told.status, told.outcome = 1.5, THERE, 200, "ended"
    told.headers_s, told.ttft_s, told.cached_tokens = 0.25, 0.75, 512
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
    told = decision()
    told.waited_s = 2.0
    traces.one(pick(told), seconds=0.5)
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
    told = decision()
    told.status, told.outcome = 503, "failed"
    traces.one(pick(told))
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
