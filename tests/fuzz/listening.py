"""The picker's entries that listen: the admin pages, and the workers' hub."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from epp.base.types import Address
from epp.sources.sharing.hub import Hub, HubLink, frame
from tests.fuzz.behind import OfBytes
from tests.fuzz.entry import Entry
from tests.harness.live_page import an_admin

_WAIT_S = 60.0


class AdminPages(OfBytes):
    """Raw bytes on the admin port."""

    seeds: Sequence[bytes] = [
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        for path in (
            "/",
            "/metrics",
            "/healthz",
            "/decisions?limit=5&endpoint=a",
            "/decisions/x%20y",
            "/nothing",
        )
    ]
    words: Sequence[bytes] = (
        b"Host: 127.0.0.1\r\n",
        b"limit=999999999",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"HEAD ",
        b"POST ",
    )

    def __init__(self, address: Address) -> None:
        self._address = address

    async def feed(self, data: bytes) -> bool:
        answer = await self._exchange(data, end=True)
        return not answer or not answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))

    async def check(self) -> None:
        answer = await self._exchange(self.seeds[2], end=False)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]

    async def _exchange(self, data: bytes, *, end: bool) -> bytes:
        """Return what comes back until the server closes. `end`: tell the server that no more comes, since
        the request may be incomplete.
        """
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        answer = b""
        try:
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
                if end:
                    writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), _WAIT_S)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert not answer.startswith(b"HTTP/1.1 500"), answer[:500]
        return answer


@asynccontextmanager
async def admin_pages(_: Path) -> AsyncIterator[Entry]:
    server = an_admin()
    address = await server.start()
    try:
        yield AdminPages(address)
    finally:
        await server.stop()


class HubFrames(OfBytes):
    """Raw bytes on the workers' socket, while two correct workers go on."""

    seeds: Sequence[bytes] = [
        frame(0, b"channel\0") + frame(0, b"channel\0batch") + frame(1, b"channel\0another"),
        frame(0, b"other\0") + frame(3, b""),
    ]
    words: Sequence[bytes] = (
        frame(0, b""),
        b"\0\0\0\1" + bytes(8),
        b"\xff\xff\xff\xff" + bytes(8),
        b"\x7f\xf8",
    )

    def __init__(self, path: Path, one: HubLink, other: HubLink) -> None:
        self._path = path
        self._one, self._other = one, other
        self._numbers = itertools.count()

    async def feed(self, data: bytes) -> bool:
        reader, writer = await asyncio.open_unix_connection(self._path)
        with contextlib.suppress(OSError):
            writer.write(data)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), _WAIT_S)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def check(self) -> None:
        """A message of one worker reaches the other."""
        batch = b"said %d" % next(self._numbers)
        await self._one.send(batch)
        async with asyncio.timeout(_WAIT_S):
            while batch not in {received.data for received in await self._other.read()}:
                pass


@asynccontextmanager
async def hub_frames(folder: Path) -> AsyncIterator[Entry]:
    path = folder / "hub.sock"
    hub = Hub(path)
    hub.start()
    one, other = HubLink(path), HubLink(path)
    try:
        for link in (one, other):
            await link.join("channel")
        yield HubFrames(path, one, other)
    finally:
        for link in (one, other):
            await link.close()
        await hub.close()


LISTENING: dict[str, Callable[[Path], AbstractAsyncContextManager[Entry]]] = {
    "admin": admin_pages,
    "hub": hub_frames,
}
