"""Makes one span for each sampled pick. The tracer listens to the picker's events. At the pick it decides
whether the pick is sampled, and at the end of the request it queues the finished span.

A span lasts from the request's arrival at the picker to its pick, including the time in the queue. The span
is sent when the request has ended, because only then its outcome is known. An unsampled request costs one
look at its trace context. OpenTelemetry's batch processor keeps a bounded queue, and sends from its own
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from epp.base.errors import FlowRefusedError
from epp.observe.tracing.attributes import Attributes, attributes_of, attributes_of_refusal, error_of
from epp.observe.tracing.traceparent import read_traceparent
from epp.picker.decision import Decision
from epp.picker.events import Began, Ended, PickerEvent, Refused

SPAN_NAME: Final = "pick"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope("prefix-gateway")


class Counted(SpanExporter):
    """Counts the spans that the collector took, and those that it did not take."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.sent = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Span(NamedTuple):
    """A sampled pick, which waits for the end of its request."""

    context: SpanContext
    parent: SpanContext | None
    start_unix_s: float
    end_unix_s: float
    content: Decision | Attributes


class Tracer:
    """Listens with `on_event`. All methods must be called on the event loop, and none of them waits."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        ids: IdGenerator,
        resource: Resource,
        processor: BatchSpanProcessor,
        unix_clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """timer: the same timer as the streams'."""
        self._sampler = sampler
        self._ids = ids
        self._resource = resource
        self._unix_clock = unix_clock
        self._timer = timer
        self.processor = processor
        """Takes the finished spans. The composition root stops it."""
        self._made = 0
        self._open: dict[int, _Span] = {}
        """Spans by the identity of picks that have not ended. The picks' streams keep the picks alive."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of spans, by what became of them."""
        exporter = self.processor.span_exporter
        assert isinstance(exporter, Counted)
        return {"made": self._made, "sent": exporter.sent, "failed": exporter.failed}

    def on_event(self, event: PickerEvent) -> None:
        """Begin the span of a pick, or queue the span of a request that is over or refused."""
        if isinstance(event, Began):
            self._begin(event)
        elif isinstance(event, Ended):
            span = self._open.pop(id(event.request), None)
            if span is not None:
                self._send(span)
        elif isinstance(event, Refused):
            self._refused(event)

    # -- parts -----------------------------------------------------------------------------------------------

    def _begin(self, event: Began) -> None:
        contexts = self._sampled(event.asked.trace)
        if contexts is None:
            return
        decision, (context, parent) = event.request.decision, contexts
        decision.trace_id = f"{context.trace_id:032x}"
        start = decision.at_unix_s - decision.waited_s
        end = decision.at_unix_s + event.picked_in_s(timer_s=self._timer())
        self._open[id(event.request)] = _Span(context, parent, start, end, decision)

    def _refused(self, event: Refused) -> None:
        contexts = self._sampled(event.trace)
        if contexts is None:
            return
        now, error = self._unix_clock(), event.error
        waited_s = error.waited_s if isinstance(error, FlowRefusedError) else 0.0
        attributes = attributes_of_refusal(event.request_id, error)
        self._send(_Span(*contexts, now - waited_s, now, attributes))

    def _sampled(self, trace: str) -> tuple[SpanContext, SpanContext | None] | None:
        """Return the contexts of the new span and of its parent. None: this request is not sampled."""
        parent, above = None, None
        caller = read_traceparent(trace) if trace else None
        if caller is not None:
            flags = _SAMPLED if caller.sampled else TraceFlags.get_default()
            parent = SpanContext(caller.trace_id, caller.span_id, is_remote=True, trace_flags=flags)
            above = set_span_in_context(NonRecordingSpan(parent))
        trace_id = self._ids.generate_trace_id() if caller is None else caller.trace_id
        if self._sampler.should_sample(above, trace_id, SPAN_NAME).decision is not Sampling.RECORD_AND_SAMPLE:
            return None
        made = SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)
        return made, parent

    def _send(self, span: _Span) -> None:
        self._made += 1
        self.processor.on_end(self._readable(span))

    def _readable(self, span: _Span) -> ReadableSpan:
        if isinstance(span.content, Decision):
            attributes, error = attributes_of(span.content), error_of(span.content)
        else:
            attributes, error = span.content, str(span.content["error.type"])
        return ReadableSpan(
            name=SPAN_NAME,
            context=span.context,
            parent=span.parent,
            resource=self._resource,
            attributes=attributes,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=int(span.start_unix_s * 1e9),
            end_time=int(span.end_unix_s * 1e9),
            instrumentation_scope=_SCOPE,
        )
