"""The data plane's side of ext_proc: it carries out a picker's answers, and fails where no data plane could
use them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire

from epp.tools.conformance.dataplane import BUFFERED, DESTINATION, DUPLEX, METHOD, Mode, exchange

Script = Mapping[str, list[Any]]
"""The answers to a message of each kind."""
HEAD = wire.ProcessingResponse(request_headers={})
BODY = wire.ProcessingResponse(request_body={})
BACK = wire.ProcessingResponse(
    request_body={"response": {"body_mutation": {"streamed_response": {"body": b"{}"}}}}
)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[grpc.aio.Channel]:
    """Return a channel to a picker that gives these answers over real gRPC. None ends the stream."""

    async def process(requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        async for request in requests:
            for answer in script.get(request.WhichOneof("request"), ()):
                if answer is None:
                    return
                yield answer

    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=wire.ProcessingRequest.FromString,
        response_serializer=wire.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_headers_are_removed_replaced_and_added_as_the_picker_says() -> None:
    head = wire.ProcessingResponse(request_headers={})
    mutation = head.request_headers.response.header_mutation
    mutation.remove_headers.append("X-Gone")
    for name, value, append in (("X-Old", "new", False), ("x-more", "2", True), (DESTINATION, "a, b", False)):
        option = mutation.set_headers.add()
        option.header.key, option.header.value, option.append.value = name, value, append
    script = {"request_headers": [head], "request_body": [BODY]}
    async with scripted(script) as channel, exchange(channel) as asked:
        await asked.send(b"{}", headers=[("x-gone", "1"), ("x-old", "1"), ("X-More", "1"), ("x-old", "2")])
        assert asked.request.values("x-gone") == []
        assert asked.request.values("x-old") == ["new"]
        assert asked.request.values("x-more") == ["1", "2"]
        assert asked.destinations == ["a", "b"]


@pytest.mark.parametrize(
    ("mode", "script", "fault"),
    [
        (BUFFERED, {"request_headers": [None]}, "the picker ended the stream: StatusCode.OK"),
        (BUFFERED, {"request_headers": [wire.ProcessingResponse(response_headers={})]}, "out of turn"),
        (
            BUFFERED,
            {"request_headers": [HEAD], "request_body": [BACK]},
            "only full duplex takes a streamed body",
        ),
        (DUPLEX, {"request_headers": [HEAD], "request_body": [BODY]}, "the body has to be sent back"),
    ],
)
async def test_answers_that_no_data_plane_can_use_are_faults(mode: Mode, script: Script, fault: str) -> None:
    async with scripted(script) as channel, exchange(channel, mode=mode) as asked:
        with pytest.raises(AssertionError, match=fault):
            await asked.send(b"{}")


async def test_a_picker_that_does_not_answer_is_a_timeout() -> None:
    async with scripted({}) as channel, exchange(channel, patience_s=0.05) as asked:
        with pytest.raises(TimeoutError):
            await asked.send(b"{}")
