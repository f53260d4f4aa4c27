"""A connection to a server on loopback that can be cut like a network, while the server itself goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.harness.listening import stop_listening
from tests.harness.ports import free_port

_READ_BYTES = 2**16


class Relay:
    """Passes on the bytes of each connection, both ways, until it is cut. Made by `running_relay`."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self.port = free_port()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def mend(self) -> None:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await stop_listening(listener)
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        if self._listener is None:  # the relay was cut meanwhile
            writer.transport.abort()
            there_writer.transport.abort()
            return
        both = {writer, there_writer}
        self._writers |= both
        try:
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        finally:
            self._writers -= both
            for end in both:
                end.close()  # one of them may still be open if this task was cancelled


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def running_relay(host: str, port: int) -> AsyncIterator[Relay]:
    relay = Relay(host, port)
    await relay.mend()
    try:
        yield relay
    finally:
        await relay.cut()
