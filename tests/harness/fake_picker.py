"""An ext_proc server that answers as a test says, to see what a bootstrap makes Envoy do.

It runs in the test's event loop, decides nothing, and records what Envoy sent. It is not for tests of the
picker.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.harness.backend import Gate

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"


@dataclass(slots=True)
class EnvoyRequest:
    """One HTTP request as Envoy sent it."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    served: str = ""
    """`upstream.address` as it came with the response headers."""
    ended: bool = False
    """True when its gRPC stream is over."""


class FakePicker:
    """One worker of a picker. Made by `running_fake_picker`."""

    def __init__(self, *, address: str) -> None:
        self.address = address
        self.exchanges: list[EnvoyRequest] = []
        self.destinations = ""
        """The fallback list for each request. Empty: none is named."""
        self.gate = Gate()
        """While this gate is shut, the picker answers neither requests nor health checks."""
        self.serving = True
        """The health that the picker reports."""
        self._server: grpc.aio.Server | None = None

    @property
    def open_streams(self) -> int:
        return sum(not exchange.ended for exchange in self.exchanges)

    def always(self, *destinations: object) -> None:
        """Name the same list for every request."""
        self.destinations = ",".join(str(destination) for destination in destinations)

    async def start(self, *, credentials: grpc.ServerCredentials | None = None) -> None:
        assert self._server is None
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        server = grpc.aio.server(options=options)
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self), server)
        if credentials:
            server.add_secure_port(self.address, credentials)
        else:
            server.add_insecure_port(self.address)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Act as a killed worker: cut the streams and close the address."""
        if self._server:
            server, self._server = self._server, None
            await server.stop(grace=None)

    async def Process(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        exchange = EnvoyRequest()
        self.exchanges.append(exchange)
        try:
            async for message in messages:
                await self.gate.passed()
                yield self._answer(message, exchange)
        finally:
            exchange.ended = True

    def _answer(self, message: Any, exchange: EnvoyRequest) -> Any:
        answer = external_processor_pb2.ProcessingResponse()
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            exchange.headers = _headers(message.request_headers.headers)
            answer.request_headers.SetInParent()
            if message.request_headers.end_of_stream:
                self._pick(answer, answer.request_headers.response)
        elif kind == "request_body":
            exchange.body = (exchange.body or b"") + message.request_body.body
            answer.request_body.SetInParent()
            self._pick(answer, answer.request_body.response)
        else:
            assert kind == "response_headers", kind
            for attributes in message.attributes.values():
                if "upstream.address" in attributes.fields:
                    exchange.served = attributes.fields["upstream.address"].string_value
            answer.response_headers.SetInParent()
        return answer

    def _pick(self, answer: Any, common: Any) -> None:
        if self.destinations:
            header = base_pb2.HeaderValue(key=DESTINATION, raw_value=self.destinations.encode())
            common.header_mutation.set_headers.append(base_pb2.HeaderValueOption(header=header))
            inner = struct_pb2.Struct()
            inner.update({DESTINATION: self.destinations})
            answer.dynamic_metadata.update({"envoy.lb": inner})


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health ships no types
    def __init__(self, picker: FakePicker) -> None:
        super().__init__()
        self._picker = picker

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        await self._picker.gate.passed()
        assert request.service == SERVICE
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._picker.serving else statuses.NOT_SERVING)


def _headers(header_map: Any) -> dict[str, str]:
    return {h.key: h.value or h.raw_value.decode("latin-1") for h in header_map.headers}


@asynccontextmanager
async def running_fake_picker(
    address: str, *, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[FakePicker]:
    picker = FakePicker(address=address)
    await picker.start(credentials=credentials)
    try:
        yield picker
    finally:
        picker.gate.open()
        await picker.stop()
