"""Clients that never finish their requests hold only a part of the admin address, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from epp.base.types import Address
from epp.observe.telemetry.admin import BoundedConnections
from epp.transport.accepting import Acceptor
from tests.harness.arriving import TURNS, connect_and_stop
from tests.harness.live_page import an_admin
from tests.harness.raw_http import connection, send_raw

HALF = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = HALF + b"\r\n"


class ReadySender(asyncio.Protocol):
    """Sends `ready` on each new connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"ready\n")


@asynccontextmanager
async def listening(bound: BoundedConnections) -> AsyncIterator[Address]:
    listener, acceptor = socket.create_server(("127.0.0.1", 0)), Acceptor(bound.welcome)
    acceptor.start(listener)
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
    finally:
        await acceptor.stop()


async def test_the_oldest_connection_makes_room_for_a_new_one() -> None:
    bound = BoundedConnections(ReadySender, limit=3, lifetime_s=3600)
    async with listening(bound) as address, AsyncExitStack() as stack:
        readers = []
        for _ in range(5):
            reader, _ = await stack.enter_async_context(connection(address))
            assert await reader.readline() == b"ready\n"
            readers.append(reader)
        for closed in readers[:2]:
            assert await closed.read() == b""


async def test_a_connection_ends_after_its_time() -> None:
    bound = BoundedConnections(ReadySender, limit=3, lifetime_s=0.01)
    async with listening(bound) as address, connection(address) as (reader, _):
        assert await reader.read() == b"ready\n"


@pytest.mark.parametrize("turns", TURNS)
async def test_a_connection_that_arrives_at_a_stop_is_closed_without_an_error(turns: int) -> None:
    admin = an_admin()
    await connect_and_stop(await admin.start(), admin.stop, turns=turns)


@asynccontextmanager
async def running_admin() -> AsyncIterator[Address]:
    admin = an_admin()
    address = await admin.start()
    try:
        yield address
    finally:
        await admin.stop()


async def test_a_thousand_half_sent_requests_do_not_keep_a_probe_out() -> None:
    async with running_admin() as address, AsyncExitStack() as stack:
        for n in range(1_000):
            _, writer = await stack.enter_async_context(connection(address))
            writer.write(HALF)
            if n % 250 == 0:
                assert (await send_raw(address, WHOLE)).status == 200
        assert (await send_raw(address, WHOLE)).status == 200
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
            page = await response.text()
        open_fds = next(
            float(line.split()[1]) for line in page.splitlines() if line.startswith("process_open_fds")
        )
        assert open_fds < 1_000 + 64 + 100, "this process holds the clients' ends too"
