"""Reads a page of one server, of its metrics or of its models, over HTTP/1.1, on a connection that stays open
from page to page.

This is a tenth of an HTTP client: it asks for one path, follows no redirect, unpacks nothing, and takes only
an answer with status 200. Interim answers before it (status 1xx) are skipped. With 1,000 servers nearly all
of an idle picker's CPU goes to their pages, and a general client takes three times the CPU for a page
(docs/monitoring.md has the figures).

A server may send anything: the size of an answer is bounded, and every piece of it costs time in proportion
to its length. `PageAnswer` is pure; `PageClient` does the I/O. Called by `scraper` and `model_lists`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, cast

from yarl import URL

from epp.base.types import Address
from epp.sources.scraping.metrics_page import MetricsError

_READ_BYTES: Final = 64 * 2**10
"""Bytes that the kernel holds for one connection (it doubles this number). One turn of the loop reads no more
than that. A page of vLLM comes in one or two turns. With half of this number a page took up to a quarter more
CPU."""
_MOST_CHUNKS: Final = 4_096
"""Most chunks of one page. Servers send a page in a few chunks, and so many take some 8 ms of a turn."""
_HEAD_BYTES: Final = 16 * 2**10
_CHUNK_LINE_BYTES: Final = 256
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: |$)")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;|$)")
_DIGITS: Final = re.compile(rb"\d{1,12}")
_WORDS: Final = re.compile(rb"[^\s,]+")
_REQUEST: Final = (
    # This asks for an uncompressed page. Unpacking costs more CPU than a local network.
    "GET {path} HTTP/1.1\r\n"
    "Host: {host}\r\n"
    "Accept: {accept}\r\n"
    "Accept-Encoding: identity\r\n"
    "User-Agent: prefix-gateway-epp\r\n"
)
_METRICS: Final = "text/plain;version=0.0.4"
"""The classic text format."""


class NoPageError(MetricsError):
    """The server gave no answer, or says itself that it fails."""


class PageAnswer:
    """One answer, fed piece by piece. Raises MetricsError if the answer has no page, or a page of more than
    `most_bytes`, and ValueError if it is not HTTP.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._received = bytearray()
        """The bytes that are not read yet: first the head, then the page or the rest of its chunks."""
        self._page = bytearray()
        """The chunks of the page so far."""
        self._in_chunks = False
        self._chunks = 0
        self._size: int | None = None
        """The size of the page, if the head states it."""
        self._head_read = False
        self._heads_bytes = 0
        """The size of the heads so far: the answer's own, and those with status 1xx before it."""
        self._searched = 0
        """The number of first bytes in which no head ends. They are not searched again."""
        self.begun = False
        self.keeps_open = False
        """Whether the connection stays open for the next page."""

    def feed(self, piece: bytes) -> bool:
        """Take in what came. Returns whether the answer is whole now."""
        self.begun = True
        self._received += piece
        if not self._head_read and not self._read_head():
            return False
        if self._in_chunks:
            return self._read_chunks()
        self._bound(self._size or len(self._received))
        return self._size is not None and self._reaches(self._size)

    def end(self) -> bool:
        """Called when the connection ended. Returns whether the answer is whole."""
        return self._head_read and not self._in_chunks and self._size is None

    def page(self) -> bytearray:
        """Return the page of a whole answer. The page is not copied, so the answer is used up."""
        if self._in_chunks:
            return self._page
        if self._size is not None:
            del self._received[self._size :]
        return self._received

    def _read_head(self) -> bool:
        while (lines := self._next_head()) is not None:
            status = _STATUS.match(lines[0])
            if status is None:
                raise ValueError(f"the answer has no status: {lines[0][:40]!r}")
            if status[2].startswith(b"1") and status[2] != b"101":
                continue
            if status[2] != b"200":
                failure = NoPageError if status[2].startswith(b"5") else MetricsError
                raise failure(f"HTTP status {status[2].decode()}")
            self.keeps_open = status[1] == b"1"
            for line in lines[1:]:
                name, _, value = line.partition(b":")
                self._read_header(name.lower(), value.strip().lower())
            self._head_read = True
            return True
        return False

    def _next_head(self) -> list[bytes] | None:
        """Take the lines of the next head, with status 1xx or another. None: it is not complete."""
        received, most_bytes = self._received, _HEAD_BYTES - self._heads_bytes
        if received[:7] != b"HTTP/1."[: len(received)]:
            raise ValueError(f"the answer is not HTTP/1: {bytes(received[:40])!r}")
        # A head ends with the end of its last line and an empty line. Lines may end without a carriage return
        # (RFC 9112, 2.2).
        begin, end = self._searched, max(0, most_bytes)
        found = [(received.find(last, begin, end), len(last)) for last in (b"\n\r\n", b"\n\n")]
        at, end_bytes = min((each for each in found if each[0] >= 0), default=(-1, 0))
        if at < 0:
            if len(received) >= most_bytes:
                raise ValueError(f"the head of the answer has more than {_HEAD_BYTES} bytes")
            self._searched = max(0, len(received) - 2)
            return None
        self._searched = 0
        lines = [line.removesuffix(b"\r") for line in bytes(received[:at]).split(b"\n")]
        self._heads_bytes += at + end_bytes
        del received[: at + end_bytes]
        return lines

    def _read_header(self, name: bytes, value: bytes) -> None:
        if name == b"transfer-encoding":
            if value != b"chunked":
                raise ValueError(f"the answer has the transfer encoding {value[:40]!r}")
            self._in_chunks = True
        elif name == b"content-length":
            if not _DIGITS.fullmatch(value) or self._size not in {None, int(value)}:
                raise ValueError(f"the answer has the length {value[:40]!r}")
            self._size = int(value)
        elif name == b"connection" and b"close" in _WORDS.findall(value):
            self.keeps_open = False

    def _read_chunks(self) -> bool:
        """Move whole chunks to the page. Returns whether the last one has come."""
        received, at = self._received, 0
        while (line_end := received.find(b"\r\n", at, at + _CHUNK_LINE_BYTES)) >= 0:
            match = _CHUNK_SIZE.match(received, at, line_end)
            if match is None:
                raise ValueError(f"a chunk has the size {bytes(received[at:line_end][:40])!r}")
            size = int(match[1], 16)
            if not size:
                del received[:at]  # the next piece must not find these chunks again
                return self._ends(line_end - at)
            self._bound(len(self._page) + size)
            end = line_end + 2 + size
            if len(received) < end + 2:
                break
            if received[end : end + 2] != b"\r\n":
                raise ValueError("a chunk does not end where it should")
            self._chunks += 1
            if self._chunks > _MOST_CHUNKS:
                raise MetricsError(f"the page comes in more than {_MOST_CHUNKS} chunks")
            self._page += received[line_end + 2 : end]
            at = end + 2
        else:
            if len(received) - at >= _CHUNK_LINE_BYTES:
                raise ValueError("a chunk has no size")
        del received[:at]
        return False

    def _ends(self, at: int) -> bool:
        """Return whether the empty line has come that ends the answer. Other lines may stand before it."""
        end = self._received.find(b"\r\n\r\n", at, at + _HEAD_BYTES)
        if end >= 0:
            return self._reaches(end + 4)
        if len(self._received) - at >= _HEAD_BYTES:
            raise ValueError("the answer has no end after its last chunk")
        return False

    def _reaches(self, end: int) -> bool:
        """Return whether the answer, which ends there, is whole. Bytes after the answer belong to no
        question, so the connection closes.
        """
        if len(self._received) > end:
            self.keeps_open = False
        return len(self._received) >= end

    def _bound(self, size: int) -> None:
        if size > self._most_bytes:
            raise MetricsError(f"the page has more than {self._most_bytes} bytes")


class PageClient:
    """The connection to one server. `path` includes the query, if there is one."""

    def __init__(self, address: Address, path: str, *, accept: str = _METRICS) -> None:
        url = URL(f"http://{address}{path}")
        self._address = address
        self._request = _REQUEST.format(path=url.raw_path_qs, host=address, accept=accept).encode()
        self._connection: _Connection | None = None

    async def read(self, *, most_bytes: int, headers: Mapping[str, str] = MappingProxyType({})) -> bytearray:
        """Return the page. Raises what `PageAnswer` raises, and OSError if the server does not answer.
        headers: further headers of the request.
        """
        further = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request, kept = self._request + f"{further}\r\n".encode(), self._connection
        if kept is not None and kept.usable:
            answer = PageAnswer(most_bytes=most_bytes)
            try:
                return await kept.ask(request, answer)
            except ConnectionResetError:
                if answer.begun:
                    raise
                # The server ended the connection while the question was on its way.
        self._connection = await self._connect()
        return await self._connection.ask(request, PageAnswer(most_bytes=most_bytes))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = self._address.host, self._address.port
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ_BYTES)
            await loop.sock_connect(made, (host, port))
            _, connection = await loop.create_connection(_Connection, sock=made)
        except OSError as error:
            made.close()
            why = os.strerror(error.errno) if error.errno else str(error)
            raise NoPageError(f"cannot connect to port {port}: {why}") from error
        except BaseException:
            made.close()
            raise
        return connection


class _Connection(asyncio.Protocol):
    """Carries one question and its answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: PageAnswer | None = None
        self._whole: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None

    async def ask(self, request: bytes, answer: PageAnswer) -> bytearray:
        assert self._transport is not None, "closed"
        assert self._answer is None, "a question waits for its answer"
        self._answer, self._whole = answer, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        keeps_open = False
        try:
            await self._whole
            keeps_open = answer.keeps_open
        finally:
            self._answer = self._whole = None
            if not keeps_open:
                self.close()
        return answer.page()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, which is no subclass

    def data_received(self, data: bytes) -> None:
        if self._whole is None or self._whole.done() or self._answer is None:
            self.close()  # nothing was asked
            return
        try:
            whole = self._answer.feed(data)
        except (MetricsError, ValueError) as error:
            self._end(error)
        else:
            if whole:
                self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is None:
            return
        if error is None and self._answer.end():
            self._end(None)
        elif self._answer.begun:
            self._end(NoPageError("the server ended the connection before the end of its answer"))
        else:
            self._end(ConnectionResetError())

    def _end(self, error: Exception | None) -> None:
        if self._whole is None or self._whole.done():
            return
        if error is None:
            self._whole.set_result(None)
        else:
            self._whole.set_exception(error)
