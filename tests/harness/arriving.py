"""A connection that arrives while a server stops: no socket may be lost, whatever the order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator

from epp.types import Address

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
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):  # until the server has ended the connection
                while await loop.sock_recv(client, 2**16):
                    pass
