"""Flow control decides on a request while the picker still writes that the request waits, or while the
process ends. The data plane gets every answer, over a real gRPC channel, on both transports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.base.types import Address
from epp.config.listening import Listen
from epp.picker.gate import Gate
from epp.picker.model_queue import WaitingRequest
from epp.protocol.stream_settings import StreamSettings
from epp.transport.server import ExtProcServer
from tests.harness.slow_server import picker_of_slow_server, say_running
from tests.integration.test_extproc_server import BODY, Exchange, headers


class HastyGate(Gate):
    """Lets a waiting request go in the next turn of the event loop."""

    def offer(self, *args: Any, **options: Any) -> Any:
        offered = super().offer(*args, **options)
        if isinstance(offered, WaitingRequest):
            asyncio.get_running_loop().call_soon(lambda: self.drain(now=time.monotonic()))
        return offered


@asynccontextmanager
async def serving_held(gate: type[Gate]) -> AsyncIterator[tuple[ExtProcServer, Gate, grpc.aio.Channel]]:
    """Run a server whose requests wait, except the first one."""
    picker = picker_of_slow_server(Address("10.0.0.1", 80))
    say_running(picker, 1)
    held = gate(picker)
    server = ExtProcServer(
        picker,
        listen=Listen(address="127.0.0.1:0"),
        settings=StreamSettings(longest_delay_s=30.0),
        gate=held,
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            await Exchange(channel).route()
            yield server, held, channel
    finally:
        await server.stop()


async def begin_waiting(channel: grpc.aio.Channel) -> Exchange:
    """Send a request that waits."""
    exchange = Exchange(channel)
    await exchange.ask(headers())
    body = ext_proc.ProcessingRequest(request_body={"body": BODY, "end_of_stream": True})
    delay = await exchange.ask(body)
    assert delay.HasField("override_message_timeout")
    return exchange


async def test_a_pick_that_is_made_while_the_delay_is_written_follows_it() -> None:
    async with serving_held(HastyGate) as (_, _, channel):
        exchange = await begin_waiting(channel)
        pick = await asyncio.wait_for(exchange.call.read(), 10)
        assert pick.HasField("request_body")
