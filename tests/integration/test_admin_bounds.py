"""What clients that do not finish can take of the admin address, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from epp.config import Config
from epp.policy import DEFAULT_POLICY
from epp.telemetry.admin import AdminServer
from epp.telemetry.bounded import BoundedConnections
from epp.telemetry.decisions import DecisionRing
from epp.telemetry.metrics import Metrics
from epp.telemetry.state import PickerStatus
from epp.types import Address
from tests.harness.raw_http import ask, connection

HALF = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = HALF + b"\r\n"


class Echo(asyncio.Protocol):
    """Says `ready` to whoever comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"ready\n")


@asynccontextmanager
async def listening(factory: Callable[[], asyncio.Protocol]) -> AsyncIterator[Address]:
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def test_the_oldest_connection_makes_room_for_a_new_one() -> None:
    bound = BoundedConnections(Echo, limit=3, lifetime_s=3600)
    async with listening(bound) as address, AsyncExitStack() as stack:
        readers = []
        for _ in range(5):
            reader, _ = await stack.enter_async_context(connection(address))
            assert await reader.readline() == b"ready\n"
            readers.append(reader)
        for closed in readers[:2]:
            assert await closed.read() == b""
        assert len(bound) == 3


async def test_a_connection_ends_after_its_time() -> None:
    bound = BoundedConnections(Echo, limit=3, lifetime_s=0.01)
    async with listening(bound) as address, connection(address) as (reader, _):
        assert await reader.read() == b"ready\n"
        assert len(bound) == 0


async def test_a_thousand_half_sent_requests_do_not_keep_a_probe_out() -> None:
    ring = DecisionRing(keep=1)
    admin = AdminServer(
        address=Address("127.0.0.1", 0),
        metrics=Metrics(decisions=ring, state=PickerStatus),
        decisions=ring,
        state=PickerStatus,
        not_ready=str,
        config=Config(endpoints_file="endpoints.yaml"),
        policy=lambda: DEFAULT_POLICY,
    )
    address = await admin.start()
    async with AsyncExitStack() as stack:
        for n in range(1_000):
            _, writer = await stack.enter_async_context(connection(address))
            writer.write(HALF)
            if n % 250 == 0:
                assert (await ask(address, WHOLE)).status == 200
        assert (await ask(address, WHOLE)).status == 200
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
            page = await response.text()
        open_fds = next(
            float(line.split()[1]) for line in page.splitlines() if line.startswith("process_open_fds")
        )
        assert open_fds < 1_000 + 64 + 100, "this process holds the clients' ends too"
    await admin.stop()
