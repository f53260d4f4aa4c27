"""Connects the workers of one machine by a unix socket in the process that started them. `Hub` is the end of
that process, and `HubLink` the end of a worker.

The hub forwards every batch to all other workers of the channel, keeps the newest table of the channel for a
worker that starts again, and hands out turns. It does not look into batches. A worker that does not read fast
enough misses batches, and notices this by their numbers. A worker that dies is gone when its connection
closes. The hub ends only with the process that starts the workers, and the workers end with this process too.

A frame is its length (4 bytes, big-endian), one byte for its kind, and its content. A worker sends J with a
channel, S with a batch, T with a table, G to get the table, and N with the period (in milliseconds) and the
name of a turn. The hub sends S with a batch, T with the table or nothing, and Y or N about a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from epp.sources.sharing.link import LinkError, Received
from epp.transport.accepting import Acceptor

_HEADER: Final = struct.Struct(">IB")
_TURN: Final = struct.Struct(">I")
_AGE: Final = struct.Struct(">d")
_MOST_TURN_BYTES: Final = 256
_MOST_CHANNEL_BYTES: Final = 1_024
_MOST_BYTES: Final = 512 * 2**20
"""Largest frame. A table of a million entries takes some 10 MB."""
_UNREAD_BYTES: Final = 8 * 2**20
"""A worker with this much unread gets no more batches until it has read."""
_TIMEOUT_S: Final = 3.0
_WAIT_S: Final = 1.0
_MOST_UNREAD: Final = 4096
"""Most batches that wait for `read`. Beyond that the oldest are dropped, and the gap in their numbers shows
the loss."""


class BadFrameError(Exception):
    """The bytes are not a frame, so the connection cannot be used any more."""


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the kind and content of a frame. Raises BadFrameError, and IncompleteReadError at the end."""
    length, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > _MOST_BYTES:
        raise BadFrameError(f"a frame of {length} bytes is too long")
    return bytes((kind,)), await reader.readexactly(length)


def frame(kind: bytes, content: bytes = b"") -> bytes:
    return _HEADER.pack(len(content), kind[0]) + content


@dataclass(slots=True, eq=False)
class _Channel:
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    table: bytes = b""
    stored_at: float = 0.0
    turns: dict[bytes, float] = field(default_factory=dict)
    """For each turn that is taken, when it ends."""


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
        channel = _Channel()
        try:
            while True:
                kind, content = await read_frame(reader)
                if kind == b"J":
                    channel.writers.discard(writer)
                    channel = self._join(content, writer)
                else:
                    self._answer(channel, kind, content, writer)
                    await writer.drain()
        except (asyncio.IncompleteReadError, BadFrameError, OSError):
            return
        finally:
            channel.writers.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()

    def _join(self, name: bytes, writer: asyncio.StreamWriter) -> _Channel:
        if len(name) > _MOST_CHANNEL_BYTES:
            raise BadFrameError(f"a channel's name of {len(name)} bytes is too long")
        channel = self._channels.setdefault(name, _Channel())
        channel.writers.add(writer)
        # Channels that all workers have left are forgotten, with their tables of an earlier policy.
        self._channels = {key: each for key, each in self._channels.items() if each.writers}
        return channel

    def _answer(self, channel: _Channel, kind: bytes, content: bytes, writer: asyncio.StreamWriter) -> None:
        if kind == b"S":
            framed = frame(b"S", content)
            for other in channel.writers:
                if other is not writer and other.transport.get_write_buffer_size() < _UNREAD_BYTES:
                    other.write(framed)
        elif kind == b"T":
            channel.table, channel.stored_at = content, self._clock()
        elif kind == b"G":
            age = _AGE.pack(self._clock() - channel.stored_at)
            writer.write(frame(b"T", age + channel.table if channel.table else b""))
        elif kind == b"N":
            if not _TURN.size <= len(content) <= _MOST_TURN_BYTES:
                raise BadFrameError(f"a turn of {len(content)} bytes is too short or too long")
            period_s, name = _TURN.unpack_from(content)[0] / 1000, content[_TURN.size :]
            now = self._clock()
            channel.turns = {turn: until for turn, until in channel.turns.items() if until > now}
            free = name not in channel.turns
            if free:
                channel.turns[name] = now + period_s
            writer.write(frame(b"Y" if free else b"N"))


class HubLink:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel = b""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._asking = asyncio.Lock()
        """Allows one question at a time, since an answer does not say which question it belongs to."""
        self._connecting = asyncio.Lock()

    async def agree(self, pool: str, mine: bytes) -> bytes:  # noqa: ARG002 - as of other links
        return mine  # All workers have the secret from the process that started them.

    async def join(self, channel: str) -> None:
        self._channel = channel.encode()
        await self._send(frame(b"J", self._channel))

    async def send(self, batch: bytes) -> None:
        await self._send(frame(b"S", batch))

    async def read(self) -> list[Received]:
        await self._connected()
        received: list[Received] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                received.append(Received(await self._received.get(), 0.0))
        while not self._received.empty():
            received.append(Received(self._received.get_nowait(), 0.0))
        return received

    async def stored(self) -> Received | None:
        _, content = await self._ask(frame(b"G"))
        if not content:
            return None
        if len(content) < _AGE.size or not 0 <= (age_s := _AGE.unpack_from(content)[0]) < math.inf:
            raise LinkError("the stored value is not a table", reason="refused")
        return Received(memoryview(content)[_AGE.size :], age_s)

    async def store(self, table: bytes) -> None:
        await self._send(frame(b"T", table))

    async def take_turn(self, name: str, *, period_s: float) -> bool:
        kind, _ = await self._ask(frame(b"N", _TURN.pack(int(period_s * 1000)) + name.encode()))
        return kind == b"Y"

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

    # -- parts -----------------------------------------------------------------------------------------------

    async def _send(self, data: bytes) -> None:
        writer = await self._connected()
        try:
            writer.write(data)
            async with asyncio.timeout(_TIMEOUT_S):
                await writer.drain()
        except TimeoutError as error:
            raise LinkError("the hub does not read the batches", reason="timeout") from error
        except OSError as error:
            raise LinkError(str(error), reason="connection") from error

    async def _ask(self, question: bytes) -> tuple[bytes, bytes]:
        async with self._asking:
            while not self._answers.empty():
                self._answers.get_nowait()
            await self._send(question)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await self._answers.get()
            except TimeoutError as error:
                await self.close()  # a late answer would be taken for the answer to the next question
                raise LinkError("no answer in time", reason="timeout") from error

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
            if self._channel:
                writer.write(frame(b"J", self._channel))
            return writer

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, BadFrameError, OSError):
            while True:
                kind, content = await read_frame(reader)
                if kind != b"S":
                    self._answers.put_nowait((kind, content))
                    continue
                if self._received.qsize() >= _MOST_UNREAD:
                    self._received.get_nowait()
                self._received.put_nowait(content)
