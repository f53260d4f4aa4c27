"""A picker that gives the answers that a test wrote, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire

from epp.tools.conformance.dataplane import DESTINATION, LB

Script = Callable[[Any], Iterable[Any]]
"""Returns the answers to one message."""
_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


def named(destination: str, *, metadata: bool = True, **more: Any) -> Any:
    """Return an answer to request headers that names a destination."""
    answer = wire.ProcessingResponse()
    mutation = answer.request_headers.response.header_mutation
    mutation.set_headers.add().header.CopyFrom(_header(DESTINATION, destination))
    for name, value in more.items():
        mutation.set_headers.add().header.CopyFrom(_header(name.replace("_", "-"), value))
    if metadata:
        answer.dynamic_metadata.update({LB: {DESTINATION: destination}})
    return answer


def _header(name: str, value: str) -> Any:
    option = wire.HeadersResponse().response.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value.encode()
    return option.header


def plain(kind: str) -> Any:
    """Return an answer of a kind that changes nothing."""
    answer = wire.ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def refusing(status: int, body: bytes = b"", **headers: str) -> Any:
    answer = wire.ProcessingResponse()
    answer.immediate_response.status.code = status
    answer.immediate_response.body = body
    for name, value in headers.items():
        answer.immediate_response.headers.set_headers.add().header.CopyFrom(_header(name, value))
    return answer


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[grpc.aio.Channel]:
    """Return a channel to the picker. An answer of None ends the stream."""

    async def process(requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        async for request in requests:
            for answer in script(request):
                if answer is None:
                    return
                yield answer

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=wire.ProcessingRequest.FromString,
        response_serializer=wire.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Process": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def buffered(head: Any, *, response: Any = None) -> Script:
    """Answer headers with `head`, and everything else without a change."""

    def script(request: Any) -> Iterable[Any]:
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            return [head]
        if kind == "response_headers" and response is not None:
            return [response]
        return [plain(kind)]

    return script
