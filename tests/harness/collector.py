"""A collector of OpenTelemetry's protocol, over gRPC and over HTTP, with the spans that came."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.harness.listening import WebServer


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
