"""Makes one span for each sampled pick, by OpenTelemetry's own tracer. The tracer listens to the picker's
events. It begins the span at the pick and queues it at the end of the request, because only then the outcome
is known.

A span lasts from the request's arrival at the picker to its pick, including the time in the queue.
OpenTelemetry's batch processor keeps a bounded queue, and sends from its own thread.

Attributes are names and values, never a part of a prompt; docs/tracing.md lists the names. The GenAI and HTTP
names are OpenTelemetry's semantic conventions. Other names begin with `prefix_gateway.`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epp.base.types import ApiKind
from epp.picker.decision import Decision
from epp.picker.events import Began, Ended, Pick, PickerEvent

SPAN_NAME: Final = "pick"
_CALLER: Final = TraceContextTextMapPropagator()


class Tracer:
    """Listens with `on_event`. All methods must be called on the event loop, and none of them waits."""

    def __init__(
        self,
        provider: TracerProvider,
        processor: BatchSpanProcessor,
        *,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """timer: the same timer as the streams'."""
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("prefix-gateway")
        self._timer = timer
        self.processor = processor
        """Takes the finished spans. The composition root stops it."""
        self._open: dict[int, tuple[Span, float]] = {}
        """Spans and their ends, by the identity of picks that have not ended. The picks' streams keep the
        picks alive."""

    def on_event(self, event: PickerEvent) -> None:
        """Begin the span of a pick, or queue the span of a request that is over."""
        if type(event) is Began:
            self._begin(event)
        elif type(event) is Ended:
            self._end(event.pick)

    def _begin(self, event: Began) -> None:
        decision, caller = event.pick.decision, event.question.trace
        span = self._tracer.start_span(
            SPAN_NAME,
            _CALLER.extract({"traceparent": caller}, Context()) if caller else Context(),
            kind=SpanKind.SERVER,
            start_time=int((decision.at_unix_s - decision.waited_s) * 1e9),
        )
        context = span.get_span_context()
        if context.trace_flags.sampled:
            decision.trace_id = f"{context.trace_id:032x}"
            end = decision.at_unix_s + event.picked_in_s(timer_s=self._timer())
            self._open[id(event.pick)] = span, end

    def _end(self, pick: Pick) -> None:
        span, end_unix_s = self._open.pop(id(pick), (None, 0.0))
        if span is None:
            return
        span.set_attributes(attributes_of(pick.decision))
        if error := error_of(pick.decision):
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int(end_unix_s * 1e9))


# -- attributes ----------------------------------------------------------------------------------------------

_OPERATIONS: Final[Mapping[str, str]] = {
    ApiKind.MESSAGES: "chat",
    ApiKind.RESPONSES: "chat",
    ApiKind.COMPLETIONS: "text_completion",
}
"""The others are called as in the conventions."""


def attributes_of(decision: Decision) -> dict[str, str | int | float]:
    """Return the attributes of a finished request. Unknown values are left out."""
    served = decision.served or decision.destinations[0]
    chosen = next(iter(decision.candidates), None)
    tokens = chosen.backlog_tokens + chosen.uncached_tokens if chosen else 0
    predicted_s = tokens / chosen.prefill_tokens_per_s if chosen else None
    found = {
        "gen_ai.operation.name": _OPERATIONS.get(decision.kind, decision.kind),
        "gen_ai.request.model": decision.model or None,
        "gen_ai.usage.cache_read.input_tokens": decision.cached_tokens,
        "http.response.status_code": decision.status,
        "error.type": error_of(decision) or None,
        "server.address": served.host,
        "server.port": served.port,
        "prefix_gateway.request_id": decision.request_id,
        "prefix_gateway.rule": decision.rule,
        "prefix_gateway.policy": decision.policy,
        "prefix_gateway.reason": decision.reason,
        "prefix_gateway.endpoint": decision.chosen,
        "prefix_gateway.served_by": decision.served_by or None,
        "prefix_gateway.prefill_endpoint": decision.prefill.name if decision.prefill else None,
        "prefix_gateway.adapter": decision.adapter or None,
        "prefix_gateway.unread": decision.unread or None,
        "prefix_gateway.prompt_tokens": decision.prompt_tokens,
        "prefix_gateway.matched_tokens": decision.matched_tokens,
        "prefix_gateway.predicted_first_token_seconds": predicted_s,
        "prefix_gateway.score_seconds": chosen.score_s if chosen else None,
        "prefix_gateway.queue_seconds": decision.waited_s,
        "prefix_gateway.headers_seconds": decision.headers_s,
        "prefix_gateway.first_token_seconds": decision.ttft_s,
        "prefix_gateway.outcome": decision.outcome,
    }
    return {name: value for name, value in found.items() if value is not None}


def error_of(decision: Decision) -> str:
    """Return the reason why the request counts as an error. Empty: it is not an error. A request whose client
    left is not an error either.
    """
    if decision.status is not None and decision.status >= 500:
        return str(decision.status)
    return "failed" if decision.outcome == "failed" else ""
