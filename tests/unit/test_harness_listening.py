"""A server of the tests is closed while a connection arrives, at every turn of the loop at which that can
happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator

import pytest

from epp.types import Address
from tests.harness.backend import Backend
from tests.harness.listening import stop_listening
from tests.harness.ports import free_port

TURNS = range(6)
"""asyncio needs fewer turns than this to take a connection and to serve it."""


@contextlib.contextmanager
def no_socket_is_lost() -> Iterator[None]:
    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


async def connect_and_stop(address: Address, stop: Callable[[], Awaitable[None]], *, turns: int) -> None:
    """The kernel accepts the connection at once. `turns` turns of the loop later the server stops."""
    with no_socket_is_lost(), socket.create_connection((address.host, address.port)) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop()
        received = asyncio.get_running_loop().sock_recv(client, 1)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(received, 10) == b"", "the server has ended the connection"


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
