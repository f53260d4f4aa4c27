"""Connects the workers of one machine by a unix socket in the process that started them. `Hub` is the end of
that process, and `HubLink` the end of a worker.

The hub forwards every batch to all other workers of the channel. It keeps the newest batches, and sends them
to a worker that joins later. It does not look into batches. A worker that does not read fast enough misses
batches, and notices this by their numbers. A worker that dies is gone when its connection closes. The hub
ends only with the process that starts the workers, and the workers end with this process too.

A frame is the length of its content (4 bytes, big-endian), the age of its content in seconds (a double), and
the content. The first frame of a worker is the name of its channel. All others, in both directions, are
batches.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from epp.sources.sharing.batches import MOST_BATCH_BYTES, LinkError, Received
from epp.transport.accepting import Acceptor

_HEADER: Final = struct.Struct(">Id")
_UNREAD_BYTES: Final = 8 * 2**20
"""A worker with this much unread gets no more batches until it has read."""
_KEPT_BYTES: Final = 16 * 2**20
"""Batches of a channel that are kept for workers that join later."""
_TIMEOUT_S: Final = 3.0
_WAIT_S: Final = 0.2
_MOST_UNREAD: Final = 65_536
"""Most batches that wait for `read`. Beyond that the oldest are dropped, and the gap in their numbers shows
the loss."""


class BadFrameError(Exception):
    """The bytes are not a frame, so the connection cannot be used any more."""


async def read_frame(reader: asyncio.StreamReader) -> Received:
    """Return a batch and its age. Raises BadFrameError, and IncompleteReadError at the end."""
    length, age_s = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > MOST_BATCH_BYTES or not 0 <= age_s < 2**40:
        raise BadFrameError(f"a frame of {length} bytes and {age_s} s")
    return Received(await reader.readexactly(length), age_s)


def frame(content: bytes, *, age_s: float = 0.0) -> bytes:
    return _HEADER.pack(len(content), age_s) + content


@dataclass(slots=True, eq=False)
class _Channel:
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    kept: deque[tuple[float, bytes]] = field(default_factory=deque)
    """When each batch came, and the batch. The oldest first."""
    kept_bytes: int = 0


class Hub:
    """Serves until it is closed. The permissions of the socket's directory decide who may connect."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._channels: dict[bytes, _Channel] = {}
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
        name = b""
        try:
            name = bytes((await read_frame(reader)).data)
            channel = self._channels.setdefault(name, _Channel())
            now = self._clock()
            writer.writelines([frame(batch, age_s=now - at) for at, batch in channel.kept])
            channel.writers.add(writer)
            while True:
                self._pass_on(bytes((await read_frame(reader)).data), channel, writer)
        except (asyncio.IncompleteReadError, BadFrameError, OSError):
            return
        finally:
            if name in self._channels:
                self._channels[name].writers.discard(writer)
                if not self._channels[name].writers:  # a channel of an earlier policy
                    del self._channels[name]
            with contextlib.suppress(OSError):
                writer.close()

    def _pass_on(self, batch: bytes, channel: _Channel, sender: asyncio.StreamWriter) -> None:
        channel.kept.append((self._clock(), batch))
        channel.kept_bytes += len(batch)
        while channel.kept_bytes > _KEPT_BYTES:
            channel.kept_bytes -= len(channel.kept.popleft()[1])
        framed = frame(batch)
        for other in channel.writers:
            if other is not sender and other.transport.get_write_buffer_size() < _UNREAD_BYTES:
                other.write(framed)


class HubLink:
    """A worker's end of the hub: a `batches.Link`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel = b""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        self._connecting = asyncio.Lock()

    async def agree(self, _: str, mine: bytes) -> bytes:
        """Return `mine`: all workers have the secret from the process that started them."""
        return mine

    async def join(self, channel: str) -> None:
        self._channel = channel.encode()
        await self.close()
        await self._connected()

    async def send(self, batch: bytes) -> None:
        writer = await self._connected()
        try:
            writer.write(frame(batch))
            async with asyncio.timeout(_TIMEOUT_S):
                await writer.drain()
        except TimeoutError as error:
            raise LinkError("the hub does not read the batches", reason="timeout") from error
        except OSError as error:
            raise LinkError(str(error), reason="connection") from error

    async def read(self) -> list[Received]:
        await self._connected()
        received: list[Received] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                received.append(await self._received.get())
        while not self._received.empty():
            received.append(self._received.get_nowait())
        return received

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
        async with self._connecting:
            if self._writer is not None and self._reading is not None and not self._reading.done():
                return self._writer
            await self.close()
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                raise LinkError(f"{self._path}: {error.strerror}", reason="connection") from error
            self._writer = writer
            self._reading = asyncio.create_task(self._receive(reader), name="sharing: receiving")
            writer.write(frame(self._channel))
            return writer

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, BadFrameError, OSError):
            while True:
                received = await read_frame(reader)
                if self._received.qsize() >= _MOST_UNREAD:
                    self._received.get_nowait()
                self._received.put_nowait(received)
