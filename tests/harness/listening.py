"""Servers in a test's event loop that close without losing a connection.

Python 3.11 has a gap: asyncio takes a connection from the kernel in one turn of the loop and gives it to the
server in the next turn. If the server is closed between these two turns, nobody owns the connection, and
Python warns about its socket when the garbage collector finds it, which may be in any later test.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from epp.base.types import Address

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def stop_listening(server: asyncio.Server) -> None:
    """Close the server's listening sockets. When this returns, each connection that was taken before has been
    given to the server, and its protocol has been called.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    # The loop runs what is ready in order. In the first turn the connections are given to the server, which
    # still has to be open. In the second turn their protocols are called.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    server.close()


class WebServer:
    """Serves an aiohttp application, from its first `listen` to `stop`."""

    def __init__(self, app: web.Application) -> None:
        # A timeout of 0 would mean no timeout. `stop` cuts the connections, which cancels the handlers.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        self._listening: list[asyncio.Server] = []

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Accept connections at one more address. Return the port."""
        if self._runner.server is None:
            await self._runner.setup()
            assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._runner.server, host, port, backlog=4096)
        self._listening.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Cut all connections and close the ports, as if the server had been killed."""
        for server in self._listening:
            await stop_listening(server)
        self._listening = []
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport:
                connection.transport.abort()
        await self._runner.cleanup()


@asynccontextmanager
async def serving(app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Serve `app` and return its port."""
    server = WebServer(app)
    try:
        yield await server.listen(host, port)
    finally:
        await server.stop()


@asynccontextmanager
async def serving_path(path: str, handler: Handler) -> AsyncIterator[Address]:
    """Serve one path, with any method. Yield the server's address."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    async with serving(app) as port:
        yield Address("127.0.0.1", port)


@asynccontextmanager
async def accepting(
    connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    hosts: str | Sequence[str] = "127.0.0.1",
    port: int = 0,
    **options: Any,
) -> AsyncIterator[int]:
    """Call `connected` with the streams of each connection. Return the port."""
    server = await asyncio.start_server(connected, hosts, port, **options)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        await stop_listening(server)
