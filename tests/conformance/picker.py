"""Our picker for these tests: `epp serve` as its own process, with model servers that the tests script."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.config.settings import Config
from tests.harness import data_plane
from tests.harness.backend import Backend, running_backend
from tests.harness.data_plane import BUFFERED, Mode, StreamExchange
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_endpoints, write_policy
from tests.harness.ports import free_port

BODY: Final = b'{"model": "m", "prompt": "hello"}'
"""An ordinary completion request."""

CALM: Mapping[str, Any] = {
    "sampling": {"share": 0},
    "scrape": {"failuresToEject": 100},
    "failures": {"costSeconds": 0, "maxEjectedShare": 0, "hangSeconds": 0},
}
"""A policy under which the picker does nothing by itself. It samples no answers, and it drops no endpoint
while the test's loop is busy elsewhere.
"""


@dataclass(slots=True)
class OwnPicker:
    """Our picker as its own process, with model servers that the test scripts. `endpoints` are the `ip:port`
    from which it may choose. All of them are ready.
    """

    channel: grpc.aio.Channel
    endpoints: Sequence[str]
    process: PickerProcess
    config: Config
    backends: Sequence[Backend]
    _exchanges: int = 0

    @asynccontextmanager
    async def exchange(self, mode: Mode = BUFFERED) -> AsyncIterator[StreamExchange]:
        if self._exchanges % 15 == 0:  # so that it reads every body even on a busy machine
            await self.process.reads_bodies()
        self._exchanges += 1
        async with data_plane.exchange(self.channel, mode=mode) as exchange:
            yield exchange

    async def route(self, mode: Mode = BUFFERED, body: Any = BODY, **request: Any) -> StreamExchange:
        """Route one request from start to end. The picked server answers 200."""
        async with self.exchange(mode) as exchange:
            await exchange.send(body, **request)
            if exchange.immediate is None:
                await exchange.respond(b'{"choices": []}' if mode.response else None)
                assert await exchange.finish() is grpc.StatusCode.OK
            return exchange

    async def health(self, service: str) -> int:
        return await health_of(self.channel, service)


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status)


@asynccontextmanager
async def own_picker(
    directory: Path, *, policy: Mapping[str, Any] = CALM, **fields: Any
) -> AsyncIterator[OwnPicker]:
    """Run `epp serve` on a free port, with four model servers, of which one has an IPv6 address."""
    address = f"127.0.0.1:{free_port()}"
    listen = {"address": address, **fields.pop("listen", {})}
    config = config_in(directory, listen=listen, policyFile=str(directory / "policy.yaml"), **fields)
    write_policy(config, policy)
    async with AsyncExitStack() as stack:
        hosts = ("127.0.0.1", "127.0.0.1", "127.0.0.1", "::1")
        backends = [
            await stack.enter_async_context(running_backend(f"s{n}", host=host))
            for n, host in enumerate(hosts)
        ]
        write_endpoints(config, backends)
        process = await stack.enter_async_context(running_picker(config, directory=directory))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield OwnPicker(channel, [str(b.address) for b in backends], process, config, backends)
