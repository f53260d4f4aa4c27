"""A server of the tests is closed while a connection arrives, at every turn of the loop at which that can
happen.
"""

from __future__ import annotations

import asyncio

import pytest

from epp.base.types import Address
from tests.harness.arriving import TURNS, connect_and_stop
from tests.harness.backend import Backend
from tests.harness.listening import stop_listening
from tests.harness.ports import free_port


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_backend_stops_while_a_connection_arrives(host: str, turns: int) -> None:
    backend = Backend("a", address=Address(host=host, port=free_port(host=host)))
    await backend.start()
    await connect_and_stop(backend.address, backend.stop, turns=turns)


@pytest.mark.parametrize("turns", TURNS)
async def test_a_stream_server_stops_while_a_connection_arrives(turns: int) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    await connect_and_stop(address, lambda: stop_listening(server), turns=turns)
