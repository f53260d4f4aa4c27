"""Connects the workers of one machine by a unix socket in the process that started them. `Hub` is the end of
that process, and `HubLink` the end of a worker.

The hub forwards what a worker sends to all other workers. A worker writes the name of its channel before each
batch, and leaves out batches of other channels. The hub keeps the newest batches. A worker that connects
sends the name alone first, and gets those of its channel. A worker that does not read fast enough misses
batches, and notices this by their numbers. A worker that dies is gone when its connection closes. The hub
ends only with the process that starts the workers, and the workers end with this process too.

A frame is the length of its content (4 bytes, big-endian), the time when it was sent (a double, in seconds of
the clock that all processes of a machine share), and the content.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from epp.sources.sharing.batches import MOST_BATCH_BYTES, LinkError, Received
from epp.transport.accepting import Acceptor

_HEADER: Final = struct.Struct(">Id")
_UNREAD_BYTES: Final = 8 * 2**20
"""A worker has up to twice as much unread. If this much waits for it at the hub, too, it gets no more batches
until it has read."""
_KEPT_BYTES: Final = 16 * 2**20
"""Batches that are kept for workers that connect later."""
_TIMEOUT_S: Final = 3.0
_WAIT_S: Final = 0.2
_MOST_WAITING: Final = 128
"""Most batches that wait for `read`, of 400 KB at most. Further ones wait unread."""


async def read_frame(reader: asyncio.StreamReader) -> tuple[float, bytes]:
    """Return the time and the content. Raises ConnectionError, or IncompleteReadError at the end."""
    length, at = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > MOST_BATCH_BYTES or not 0 <= at < 2**40:
        raise ConnectionError(f"a frame of {length} bytes and {at} s")
    return at, await reader.readexactly(length)


def frame(at: float, content: bytes) -> bytes:
    return _HEADER.pack(len(content), at) + content


class Hub:
    """Serves until it is closed. The permissions of the socket's directory decide who may connect."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writers: set[asyncio.StreamWriter] = set()
        self._kept: deque[tuple[float, bytes]] = deque()
        """When each content was sent, and the content. The oldest first."""
        self._kept_bytes = 0
        self._acceptor = Acceptor(self._serve)

    def start(self) -> None:
        """Listen. OSError: the path cannot be used."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._acceptor.start(listener)

    async def close(self) -> None:
        await self._acceptor.stop()

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        try:
            _, channel = await read_frame(reader)
            writer.writelines([frame(*each) for each in self._kept if each[1].startswith(channel)])
            self._writers.add(writer)
            while True:
                self._pass_on(*await read_frame(reader), writer)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()

    def _pass_on(self, at: float, content: bytes, sender: asyncio.StreamWriter) -> None:
        self._kept.append((at, content))
        self._kept_bytes += len(content)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        framed = frame(at, content)
        for other in self._writers:
            if other is not sender and other.transport.get_write_buffer_size() < _UNREAD_BYTES:
                other.write(framed)


class HubLink:
    """A worker's end of the hub: a `batches.Link`."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._channel = b""
        """What stands before each batch of its channel."""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._received: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_WAITING)

    async def agree(self, _: str, mine: bytes) -> bytes:
        """Return `mine`: all workers have the secret from the process that started them."""
        return mine

    async def join(self, channel: str) -> None:
        self._channel = channel.encode() + b"\0"
        await self.close()
        self._received = asyncio.Queue(_MOST_WAITING)
        await self._connected()

    async def send(self, batch: bytes) -> None:
        writer = await self._connected()
        try:
            writer.write(frame(self._clock(), self._channel + batch))
            async with asyncio.timeout(_TIMEOUT_S):
                await writer.drain()
        except TimeoutError as error:
            raise LinkError("the hub does not read the batches", reason="timeout") from error
        except OSError as error:
            await self.close()  # the connection may end while received batches wait to be read
            raise LinkError(str(error), reason="connection") from error

    async def read(self) -> list[Received]:
        received: list[tuple[float, bytes]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                received.append(await self._received.get())
        while not self._received.empty():
            received.append(self._received.get_nowait())
        now = self._clock()
        return [Received(batch, max(0.0, now - at)) for at, batch in received]

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _connected(self) -> asyncio.StreamWriter:
        """Return the connection, opened again if the last one has ended. Raises LinkError."""
        if self._writer is not None and self._reading is not None and not self._reading.done():
            return self._writer
        await self.close()
        try:
            reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_UNREAD_BYTES)
        except OSError as error:
            raise LinkError(f"{self._path}: {error.strerror}", reason="connection") from error
        self._writer.write(frame(self._clock(), self._channel))
        self._reading = asyncio.create_task(self._receive(reader), name="sharing: receiving")
        return self._writer

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                at, content = await read_frame(reader)
                if content.startswith(self._channel):
                    await self._received.put((at, content.removeprefix(self._channel)))
