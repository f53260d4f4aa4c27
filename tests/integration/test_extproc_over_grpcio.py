"""On grpcio, calls wait inside gRPC, where the picker cannot see them. Our Envoy puts the time at which a
request began into the metadata of its call, so that the picker knows how late the request is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.config.listening import Listen
from epp.types import BEGAN
from tests.integration.test_extproc_server import METHOD, headers, serving_picker

BUFFERED = 2


def call(channel: grpc.aio.Channel, *, began: str) -> Any:
    return channel.stream_stream(
        METHOD,
        request_serializer=ext_proc.ProcessingRequest.SerializeToString,
        response_deserializer=ext_proc.ProcessingResponse.FromString,
    )(metadata=((BEGAN, began),))


async def answer_at_headers(channel: grpc.aio.Channel, *, began: str) -> bool:
    """Return whether the pick came with the answer to the headers."""
    asked = call(channel, began=began)
    await asked.write(headers(mode=BUFFERED))
    answer = await asked.read()
    await asked.done_writing()
    assert await asked.code() is grpc.StatusCode.OK
    return bool(answer.request_headers.response.header_mutation.set_headers)


async def test_late_calls_are_routed_from_their_headers() -> None:
    async with (
        serving_picker(listen=Listen(address="127.0.0.1:0", transport="grpcio")) as rig,
        grpc.aio.insecure_channel(rig.target) as channel,
    ):
        for odd in ("", "x", "nan", "-1", "inf", str(time.time() + 1000)):
            assert not await answer_at_headers(channel, began=odd)
        assert not await answer_at_headers(channel, began=str(time.time()))
        async with asyncio.timeout(60):
            while not any(
                await asyncio.gather(
                    *(answer_at_headers(channel, began=str(time.time() - 1)) for _ in range(20))
                )
            ):
                pass
        assert rig.server.overload.share(now=time.monotonic()) > 0
        assert not await answer_at_headers(channel, began=str(time.time())), "this call comes in time"
        await rig.settled()
        assert rig.in_flight() == 0
