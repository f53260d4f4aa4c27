"""Checks that no socket is lost if a connection arrives while a server stops, in whatever order."""

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from epp.base.types import Address

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


async def connect_and_stop(place: Address | Path, stop: Callable[[], Awaitable[None]], *, turns: int) -> None:
    """The kernel accepts the connection at once. `turns` turns of the loop later the server stops."""
    loop = asyncio.get_running_loop()
    errors: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    with no_socket_is_lost(), _connected(place) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):  # until the server has ended the connection
                while await loop.sock_recv(client, 2**16):
                    pass
    await asyncio.sleep(0)  # asyncio tells a protocol in the next turn that its connection is closed.
    assert errors == []


def _connected(place: Address | Path) -> socket.socket:
    if isinstance(place, Address):
        return socket.create_connection((place.host, place.port))
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(place))
    return client
