"""Connects the workers of one machine: a unix socket in the process that started them.

The hub forwards every batch to all other workers of the channel, keeps the newest table of the channel for a
worker that starts again, and hands out turns. It does not look into batches. A worker that does not read fast
enough misses batches, and notices this by their numbers. A worker that dies is gone when its connection
closes. The hub ends only with the process that starts the workers, and the workers end with this process too.

A frame is its length (4 bytes, big-endian), one byte for its kind, and its content. From a worker: J channel,
S batch, T table, G (give me the table), N period in milliseconds and name of a turn. To a worker: S batch, T
table or nothing, Y or N.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct(">IB")
_TURN: Final = struct.Struct(">I")
_MOST_TURN_BYTES: Final = 256
_MOST_CHANNEL_BYTES: Final = 1_024
_MOST_BYTES: Final = 512 * 2**20
"""Largest frame. A table of a million entries takes some 10 MB."""
_UNREAD_BYTES: Final = 8 * 2**20
"""A worker with this much unread gets no more batches until it has read."""


class BadFrameError(Exception):
    """The bytes are not a frame, so the connection cannot be used any more."""


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Kind and content of a frame. Raises BadFrameError, and IncompleteReadError at the end."""
    length, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > _MOST_BYTES:
        raise BadFrameError(f"a frame of {length} bytes")
    return bytes((kind,)), await reader.readexactly(length)


def frame(kind: bytes, content: bytes = b"") -> bytes:
    return _HEADER.pack(len(content), kind[0]) + content


@dataclass(slots=True, eq=False)
class _Channel:
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    table: bytes = b""
    turns: dict[bytes, float] = field(default_factory=dict)
    """For each turn that is taken, when it ends."""


class Hub:
    """Serves until it is closed. The permissions of the socket's directory decide who may connect."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._channels: dict[bytes, _Channel] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        self._path.chmod(0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
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
        except (asyncio.IncompleteReadError, BadFrameError, OSError, asyncio.CancelledError):
            return
        finally:
            channel.writers.discard(writer)
            self._tasks.discard(task)
            with contextlib.suppress(OSError):
                writer.close()

    def _join(self, name: bytes, writer: asyncio.StreamWriter) -> _Channel:
        if len(name) > _MOST_CHANNEL_BYTES:
            raise BadFrameError(f"a channel's name of {len(name)} bytes")
        channel = self._channels.setdefault(name, _Channel())
        channel.writers.add(writer)
        self._forget_others(name)
        return channel

    def _forget_others(self, joined: bytes) -> None:
        """Forget channels that all workers have left, with their tables of an earlier policy."""
        left = [name for name, channel in self._channels.items() if not channel.writers and name != joined]
        for name in left:
            del self._channels[name]

    def _answer(self, channel: _Channel, kind: bytes, content: bytes, writer: asyncio.StreamWriter) -> None:
        if kind == b"S":
            said = frame(b"S", content)
            for other in channel.writers:
                if other is not writer and other.transport.get_write_buffer_size() < _UNREAD_BYTES:
                    other.write(said)
        elif kind == b"T":
            channel.table = struct.pack(">d", self._clock()) + content
        elif kind == b"G":
            age_s = self._clock() - struct.unpack(">d", channel.table[:8])[0] if channel.table else 0.0
            writer.write(frame(b"T", struct.pack(">d", age_s) + channel.table[8:] if channel.table else b""))
        elif kind == b"N":
            if not _TURN.size <= len(content) <= _MOST_TURN_BYTES:
                raise BadFrameError(f"a turn of {len(content)} bytes")
            period_s, name = _TURN.unpack_from(content)[0] / 1000, content[_TURN.size :]
            now = self._clock()
            channel.turns = {turn: until for turn, until in channel.turns.items() if until > now}
            free = name not in channel.turns
            if free:
                channel.turns[name] = now + period_s
            writer.write(frame(b"Y" if free else b"N"))
