"""Spans of a real picker behind a real Envoy, as a collector receives them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.harness.gateway import Gateway, running_gateway
from tests.harness.listening import WebServer, accepting
from tests.harness.ports import free_port
from tests.harness.processes import wait_until


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """A running collector."""

    grpc_port: int = 0
    http_port: int = 0
    spans: list[Span] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    """Everything that came, as bytes."""

    def take(self, payload: bytes) -> None:
        self.payloads.append(payload)
        for resource in trace_service_pb2.ExportTraceServiceRequest.FromString(payload).resource_spans:
            service = _attributes(resource.resource).get("service.name", "")
            self.spans += [
                Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    service=service,
                    attributes=_attributes(span),
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]

    async def over_http(self, request: web.Request) -> web.Response:
        self.take(await request.read())
        return web.Response(content_type="application/x-protobuf")


class _OverGrpc(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
        self._collector.take(request.SerializeToString())
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", collector.over_http)
    web_server, server = WebServer(app), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_OverGrpc(collector), server)  # type: ignore[no-untyped-call]
    collector.grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    collector.http_port = await web_server.listen()
    try:
        yield collector
    finally:
        await server.stop(0)
        await web_server.stop()


def _attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"
SECRET_PROMPT = "the-words-of-a-client " * 40
EVERY_ANSWER = {"sampling": {"share": 1.0}}
pytestmark = pytest.mark.envoy


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of every picker: spans leave soon, and a picker waits for a hung collector longer
    than any test lasts.
    """
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")


async def spans_of(gateway: Gateway, request_id: str, spans: list[Span]) -> Span:
    """Return the span of the pick of one request."""
    found: list[Span] = []

    def came() -> bool:
        found[:] = [s for s in spans if s.attributes.get("prefix_gateway.request_id") == request_id]
        return bool(found)

    await wait_until(came, what=f"the span of {request_id}")
    (span,) = found
    return span


async def test_with_envoys_own_tracing_all_spans_of_a_request_are_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.grpc_port}")
        traced = {"collector": f"127.0.0.1:{collector.grpc_port}", "samplePercent": 100}
        async with running_gateway(
            tmp_path, policy=EVERY_ANSWER, tracing=True, envoy={"tracing": traced}
        ) as gateway:
            for n, headers in enumerate(({"traceparent": CALLER}, {})):
                asked = {**headers, "x-request-id": f"r{n}"}
                async with gateway.client.stream(SECRET_PROMPT, headers=asked) as reply:
                    assert reply.status == 200
                    await reply.rest()
            await gateway.client.request("GET", "/v1/models?key=sk-secret", headers={"traceparent": CALLER})
            picks = [await spans_of(gateway, f"r{n}", collector.spans) for n in range(2)]
            decision = await gateway.picker.decision("r0")
            await wait_until(
                lambda: all(len(of_trace(collector.spans, p.trace_id)) >= 4 for p in picks),
                what="Envoy's spans",
            )
    assert picks[0].trace_id == TRACE
    assert decision is not None
    assert decision["trace_id"] == TRACE
    assert picks[1].trace_id != TRACE
    for pick in picks:
        spans = {span.span_id: span for span in of_trace(collector.spans, pick.trace_id)}
        call = spans[pick.parent_id]
        assert (pick.service, call.service) == ("prefix-gateway", "prefix-gateway-envoy")
        above = spans[call.parent_id]
        assert above.parent_id in ("", SPAN), (
            "the call of the picker is a child of Envoy's span of the request"
        )
        attributes = pick.attributes
        assert attributes["gen_ai.operation.name"] == "text_completion"
        assert attributes["gen_ai.request.model"] == "m"
        assert attributes["prefix_gateway.outcome"] == "ended"
        assert attributes["prefix_gateway.prompt_tokens"] > 100
        assert attributes["prefix_gateway.first_token_seconds"] > 0, "the answer was sampled"
        assert attributes["prefix_gateway.predicted_first_token_seconds"] > 0
    assert picks[1].attributes["prefix_gateway.matched_tokens"] > 0, "the second of two equal prompts"
    everything = b"".join(collector.payloads)
    assert b"words-of-a-client" not in everything
    assert b"/v1/models" in everything
    assert b"sk-secret" not in everything


def of_trace(spans: list[Span], trace_id: str) -> list[Span]:
    return [span for span in spans if span.trace_id == trace_id]


async def test_spans_come_over_http_from_two_workers_on_grpcio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.http_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "gateway-of-mine")
        traced = {"collector": f"127.0.0.1:{collector.grpc_port}"}
        async with running_gateway(
            tmp_path, workers=2, tracing=True, envoy={"tracing": traced}, listen={"transport": "grpcio"}
        ) as gateway:
            asked = [{"x-request-id": f"r{n}", "traceparent": CALLER} for n in range(4)]
            await asyncio.gather(*(gateway.client.complete("hi", headers=one) for one in asked))
            picks = [await spans_of(gateway, f"r{n}", collector.spans) for n in range(4)]
            unsampled = {"x-request-id": "no", "traceparent": CALLER[:-1] + "0"}
            await gateway.client.complete("hi", headers=unsampled)
            assert await gateway.picker.process.terminate() == 0
    assert {(pick.trace_id, pick.service) for pick in picks} == {(TRACE, "gateway-of-mine")}
    assert SPAN not in {pick.parent_id for pick in picks}, "Envoy's call of the picker stands between"
    assert "no" not in {span.attributes.get("prefix_gateway.request_id") for span in collector.spans}


@pytest.mark.parametrize(
    ("collector", "protocol"), [("down", "grpc"), ("hangs", "grpc"), ("hangs", "http/protobuf")]
)
async def test_a_collector_that_is_away_delays_no_answer_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, collector: str
) -> None:
    """If anything waited for the collector, it would wait for ten minutes."""
    accepted = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    hanging = accepting(hang, port=port) if collector == "hangs" else contextlib.nullcontext(port)
    async with hanging, running_gateway(tmp_path, backends=1, tracing=True) as gateway:
        for _ in range(12):
            assert (await gateway.client.complete("hi")).status == 200
        if collector == "hangs":
            await asyncio.wait_for(accepted.wait(), 60)
        for _ in range(12):
            assert (await gateway.client.complete("hi")).status == 200
        assert await gateway.envoy.bypassed() == 0
        assert await gateway.picker.process.terminate(timeout_s=60) == 0
