"""The attackers of a soak run: `python -m bench.soak.attackers NAME DIRECTORY URL` runs one of them until it
is killed. They may reach this machine only: the first worker's socket, the endpoints file, and the gateway.

The first group speaks HTTP/2 to the picker, as a data plane would that somebody has taken over. Each is a
generator of what it sends on one connection, at 10 MB/s at most. A connection that the picker closes is
opened again.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.transport.http2.frames import Setting, settings
from tests.harness.client import http_client
from tests.harness.http2_frames import CALL, NO_TABLE, block, data, grpc, headers, hello, ping

_SOCKET: Final = "picker.sock.0"
_BYTES_PER_S: Final = 10_000_000
_FRAME_BYTES: Final = 16_000
_CONNECTIONS: Final = 400
LONGEST_BYTES: Final = 200_000
"""The servers of the run refuse longer bodies."""
_IN_BYTES: Final = b"1\r\n \r\n" * 512
_PAGE_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_REFUSAL: Final = b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n"
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


async def _on_one_connection(directory: Path, _: str, *, pieces: Callable[[], Pieces]) -> None:
    rate = _Rate()
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(directory / _SOCKET)
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


async def idle_connections(directory: Path, url: str) -> None:
    """Open connections that say hello and nothing more, and open them again every five seconds."""
    while True:
        opened: list[asyncio.StreamWriter] = []
        with suppress(OSError):
            while len(opened) < _CONNECTIONS:
                opened.append((await asyncio.open_unix_connection(directory / _SOCKET))[1])
                opened[-1].write(hello())
        await asyncio.sleep(5.0)
        for writer in opened:
            writer.transport.abort()


async def long_prompts(_: Path, url: str, *, size_bytes: int) -> None:
    """Ask for streams with long prompts, and leave as soon as their headers come."""
    rate, words = _Rate(), "word " * (size_bytes // 5)
    async with http_client(url) as client:
        for number in count():
            with suppress(aiohttp.ClientError, OSError):
                async with client.stream(f"long {number} {words}") as reply:
                    reply.abort()
            await rate.sent(size_bytes)


async def new_servers(directory: Path, _: str, *, at_once: int) -> None:
    """Replace some servers by others of new names, until SIGTERM. Each sends its metrics and its list of
    models in chunks of one byte, without an end.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    file, new, rate = directory / "endpoints.yaml", directory / "endpoints.attack", _Rate()
    usual = file.read_text()

    def add(lines: str) -> None:
        new.write_text(usual.replace("endpoints:\n", "endpoints:\n" + lines))
        new.replace(file)

    async def in_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, asyncio.CancelledError), closing(writer):
            asks = (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET")
            writer.write(_PAGE_HEAD if asks else _REFUSAL)
            while asks:
                writer.write(_IN_BYTES)
                await writer.drain()
                await rate.sent(len(_IN_BYTES))

    async with await asyncio.start_server(in_bytes, "0.0.0.0", backlog=4096) as server:
        port = server.sockets[0].getsockname()[1]
        with suppress(asyncio.CancelledError):
            for first in count(0, at_once):
                names = range(first, first + at_once)
                where = [f"127.{1 + n // 2**16}.{n // 2**8 % 2**8}.{n % 2**8}:{port}" for n in names]
                add("".join(f'- {{name: "{each}", address: "{each}"}}\n' for each in where))
                await asyncio.sleep(0.6)  # the picker takes a file that two looks, 0.25 s apart, find equal
        add("")
        await asyncio.sleep(2.0)  # meanwhile Envoy hears that they are gone


ATTACKERS: Final[Mapping[str, Callable[[Path, str], Coroutine[Any, Any, None]]]] = {
    "table sizes": partial(_on_one_connection, pieces=table_sizes),
    "cut short": partial(_on_one_connection, pieces=cut_short),
    "unread": partial(_on_one_connection, pieces=unread),
    "settings": partial(_on_one_connection, pieces=changed_settings),
    "health checks": partial(_on_one_connection, pieces=health_checks),
    "unusual headers": partial(_on_one_connection, pieces=unusual_headers),
    "idle connections": idle_connections,
    "refused prompts": partial(long_prompts, size_bytes=2 * LONGEST_BYTES),
    "aborted streams": partial(long_prompts, size_bytes=LONGEST_BYTES - 1_000),
    "names of servers": partial(new_servers, at_once=250),
    "lists in bytes": partial(new_servers, at_once=5),
}
SICK: Final[Mapping[str, Mapping[str, Any]]] = {
    "sick: 500": {"fail_next": 10**9, "fail_status": 500},
    "sick: 401": {"fail_next": 10**9, "fail_status": 401},
    "sick: 400": {"fail_next": 10**9, "fail_status": 400},
    "sick: 200 and an error": {"fails_midway_with": 500, "chunks": 2},
    "sick: resets": {"reset": True},
    "sick: cuts": {"cuts": "chunked"},
}
"""How one of the servers behaves, by the name of the attacker."""


if __name__ == "__main__":
    asyncio.run(ATTACKERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3]))
