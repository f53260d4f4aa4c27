"""A worker's end of the local socket; see `hub`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from pathlib import Path
from typing import Final

from epp.sharing.hub import BadFrameError, frame, read_frame
from epp.sharing.link import LinkError, Received

_TIMEOUT_S: Final = 3.0
_WAIT_S: Final = 1.0
_AGE: Final = struct.Struct(">d")
_MOST_UNHEARD: Final = 4096
"""Most batches that wait for `read`. Beyond that the oldest are dropped, and the gap in their numbers shows
it.
"""


class HubLink:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel = b""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._asking = asyncio.Lock()
        """Allows one question at a time, since an answer does not say which question it belongs to."""
        self._connecting = asyncio.Lock()

    async def agree(self, pool: str, mine: bytes) -> bytes:  # noqa: ARG002 - as of other links
        return mine  # All workers have the secret from the process that started them.

    async def join(self, channel: str) -> None:
        self._channel = channel.encode()
        await self._send(frame(b"J", self._channel))

    async def say(self, batch: bytes) -> None:
        await self._send(frame(b"S", batch))

    async def read(self) -> list[Received]:
        await self._connected()
        received: list[Received] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                received.append(Received(await self._heard.get(), 0.0))
        while not self._heard.empty():
            received.append(Received(self._heard.get_nowait(), 0.0))
        return received

    async def recover(self) -> None:
        await self._connected()

    async def stored(self) -> Received | None:
        _, content = await self._ask(frame(b"G"))
        if not content:
            return None
        if len(content) < _AGE.size or not 0 <= (age_s := _AGE.unpack_from(content)[0]) < math.inf:
            raise LinkError("what is stored as the table is none", reason="refused")
        return Received(memoryview(content)[_AGE.size :], age_s)

    async def store(self, table: bytes) -> None:
        await self._send(frame(b"T", table))

    async def take_turn(self, name: str, *, period_s: float) -> bool:
        kind, _ = await self._ask(frame(b"N", struct.pack(">I", int(period_s * 1000)) + name.encode()))
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
            raise LinkError("the hub does not read", reason="timeout") from error
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
        """The connection, opened again if the last one has ended. Raises LinkError."""
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
                if self._heard.qsize() >= _MOST_UNHEARD:
                    self._heard.get_nowait()
                self._heard.put_nowait(content)
