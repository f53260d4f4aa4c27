"""HTTP/1.1 as bytes, for requests that no HTTP client sends."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from epp.base.types import Address


@dataclass(frozen=True, slots=True)
class RawReply:
    """The bytes that came until the answer was whole or the connection closed. Status 0 means that there was
    no answer.
    """

    status: int
    head: str
    body: bytes

    def error(self) -> dict[str, Any]:
        """Return the `error` of a JSON body."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


@contextlib.asynccontextmanager
async def connection(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # The writer does not wait until everything is sent.


async def read_reply(reader: asyncio.StreamReader, *, timeout_s: float = 60.0) -> RawReply:
    """Read one answer that has a Content-Length or ends with its connection."""
    async with asyncio.timeout(timeout_s):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return RawReply(0, "", b"")
        length = next(
            (int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), None
        )  # fmt: skip
        body = await (reader.read() if length is None else reader.readexactly(length))
        return RawReply(int(head.split()[1]), head, body)


async def send_raw(address: Address, request: bytes, *, timeout_s: float = 60.0) -> RawReply:
    """Send `request` on a connection of its own and read one answer."""
    async with connection(address) as (reader, writer):
        writer.write(request)
        return await read_reply(reader, timeout_s=timeout_s)
