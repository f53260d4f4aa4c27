"""The attackers of a soak run: `python -m bench.soak.attackers NAME SOCKET URL` runs one of them until it is
killed. They may reach this machine only: the socket of one picker, and the gateway.

The first group speaks HTTP/2 to the picker, as a data plane would that somebody has taken over. Each is a
generator of what it sends on one connection, at 10 MB/s at most. A connection that the picker closes is
opened again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final

import aiohttp
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.transport.http2.frames import Setting, settings
from tests.harness.client import http_client
from tests.harness.http2_frames import CALL, NO_TABLE, block, data, grpc, headers, hello, ping

_BYTES_PER_S: Final = 10_000_000
_FRAME_BYTES: Final = 16_000
_CONNECTIONS: Final = 400
_LONG_BYTES: Final = 400_000
_HEALTH: Final = block(CALL, replace=((":path", "/grpc.health.v1.Health/Check"),))
_BLOCK: Final = block()
Pieces = AsyncIterator[bytes]


async def table_sizes() -> Pieces:
    """Send header blocks that are full of HPACK table size updates."""
    yield hello()
    for number in count(1, 2):
        yield headers(number, NO_TABLE * _FRAME_BYTES + _BLOCK)


async def cut_short() -> Pieces:
    """Begin big messages and never end them."""
    yield hello()
    for number in range(1, 200, 2):
        yield headers(number, _BLOCK) + data(number, b"\0" + (2**26).to_bytes(4) + bytes(_FRAME_BYTES))
    while True:
        await asyncio.sleep(1.0)
        yield ping()


async def unread() -> Pieces:
    """Ask for answers with a window of 0."""
    yield hello(window=0)
    asked = grpc(_request_headers(x_request_id="r"))
    for number in range(1, 2000, 2):
        yield headers(number, _BLOCK) + data(number, asked)
    while True:
        await asyncio.sleep(1.0)
        yield ping()


async def changed_settings() -> Pieces:
    """Widen and narrow the windows of 100 calls by a byte."""
    yield hello()
    yield b"".join(headers(number, _BLOCK) for number in range(1, 200, 2))
    for turn in count():
        yield settings([(Setting.INITIAL_WINDOW_SIZE, 65_535 + turn % 2)]) * 1_000


async def health_checks() -> Pieces:
    """Send legal health checks."""
    yield hello()
    for first in count(1, 200):
        calls = range(first, first + 200, 2)
        yield b"".join(headers(n, _HEALTH) + data(n, grpc(b""), ends=True) for n in calls)


async def unusual_headers() -> Pieces:
    """Send request headers that only the slow reader can read."""
    yield hello()
    message = grpc(_request_headers(**{f"x-unusual-{n}": "v" * 50 for n in range(700)}))
    parts = [message[at : at + _FRAME_BYTES] for at in range(0, len(message), _FRAME_BYTES)]
    for number in count(1, 2):
        yield headers(number, _BLOCK) + b"".join(data(number, part) for part in parts)


def _request_headers(**fields: str) -> bytes:
    """Return an ext_proc message whose headers stand in an attribute of an unusual name, too."""
    asked = ext_proc.ProcessingRequest()
    for name, value in fields.items():
        asked.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=value.encode())
        asked.attributes[name].update({"unusual": value})
    return bytes(asked.SerializeToString())


class _Rate:
    """Keeps an attacker at its rate, and prints the rate each second, because the run ends this process."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._bytes = 0

    async def sent(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        now = time.monotonic()
        if now >= self._since + 1.0:
            print(f"{self._bytes / (now - self._since) / 1e6:.1f}", flush=True)
            self._since, self._bytes = now, 0
        await asyncio.sleep(max(0.0, self._since + self._bytes / _BYTES_PER_S - now))


async def _on_one_connection(pieces: Callable[[], Pieces], socket: str) -> None:
    rate = _Rate()
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(socket)
            closed = asyncio.create_task(_discard(reader))
            async for piece in pieces():
                if closed.done():
                    break
                writer.write(piece)
                await writer.drain()
                await rate.sent(len(piece))
            writer.transport.abort()
            await closed
        await asyncio.sleep(0.05)


async def _discard(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(2**16):
            pass


async def idle_connections(socket: str) -> None:
    """Open connections that say hello and nothing more, and open them again every five seconds."""
    while True:
        opened = []
        with suppress(OSError):
            for _ in range(_CONNECTIONS):
                opened.append(await asyncio.open_unix_connection(socket))
                opened[-1][1].write(hello())
        await asyncio.sleep(5.0)
        for _, writer in opened:
            writer.transport.abort()


async def long_prompts(url: str) -> None:
    """Send prompts that every server refuses as too long."""
    rate = _Rate()
    async with http_client(url) as client:
        for number in count():
            with suppress(aiohttp.ClientError, OSError):
                await client.complete(f"long {number} " + "word " * (_LONG_BYTES // 5))
            await rate.sent(_LONG_BYTES)


RAW: Final[Mapping[str, Callable[[], Pieces]]] = {
    "table sizes": table_sizes,
    "cut short": cut_short,
    "unread": unread,
    "settings": changed_settings,
    "health checks": health_checks,
    "unusual headers": unusual_headers,
}
NAMES: Final = (*RAW, "idle connections", "long prompts")
SICK: Final[Mapping[str, Mapping[str, Any]]] = {
    "sick: 500": {"fail_next": 10**9, "fail_status": 500},
    "sick: 401": {"fail_next": 10**9, "fail_status": 401},
    "sick: 400": {"fail_next": 10**9, "fail_status": 400},
    "sick: resets": {"reset": True},
    "sick: cuts": {"cuts": "chunked"},
}
"""How one of the servers behaves, by the name of the attacker."""
LONGEST_BYTES: Final = _LONG_BYTES // 2
"""The servers of the run refuse longer bodies."""


async def _run(name: str, socket: str, url: str) -> None:
    if name == "idle connections":
        await idle_connections(socket)
    elif name == "long prompts":
        await long_prompts(url)
    else:
        await _on_one_connection(RAW[name], socket)


if __name__ == "__main__":
    asyncio.run(_run(*sys.argv[1:]))
