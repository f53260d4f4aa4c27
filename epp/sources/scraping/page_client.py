"""Asks one server over HTTP/1.1, for its metrics page, its list of models, or one token. The connection stays
open from question to question.

This is a tenth of an HTTP client: it follows no redirect, unpacks nothing, and takes only an answer with a
body and status 2xx. Interim answers before it (status 1xx) are skipped. With 1,000 servers nearly all of an
idle picker's CPU goes to their pages, and a general client takes three times the CPU for a page.

A server may send anything: the size of an answer is bounded, and every piece of it costs time in proportion
to its length. `read_answer` reads from a stream of bytes; `PageClient` has the socket; `ApiKey` has the key
of the model servers. Called by `scraper`, `model_lists` and `probes`.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from yarl import URL

from epp.base.errors import to_do
from epp.base.types import Address
from epp.sources.scraping.metrics_page import MetricsError

START_S: Final = 2.0
"""How long a starting picker waits for the servers' answers, and asks all of them without a pause."""
NEW_PER_S: Final = 100
"""Most servers that are asked for their first page in a later second, and as many for their lists. Whatever
they send, an answer takes up to a millisecond of CPU, so this takes a fifth of a core."""
_READ_BYTES: Final = 64 * 2**10
"""Bytes that the kernel holds for one connection (it doubles this number). One turn of the loop reads no more
than that. A page of vLLM comes in one or two turns. With half of this number a page took up to a quarter more
CPU."""
_MOST_CHUNKS: Final = 4_096
"""Most chunks of one page. Servers send a page in a few chunks, or write each line as one."""
_SMALL_CHUNKS: Final = 256
_CHUNK_BYTES: Final = 64
"""The least average size if there are more than `_SMALL_CHUNKS`. A page in bytes then takes as much CPU as a
usual page, not twenty times as much."""
_HEAD_BYTES: Final = 16 * 2**10
_MOST_LINES: Final = 256
"""Most lines of a head. Each line takes some 3 us."""
_CHUNK_LINE_BYTES: Final = 256
_CHUNKS_A_TURN: Final = 32
"""Few, because hundreds of servers may send theirs in the same turn."""
_CHUNKED: Final = -1
"""The size of a page that comes in chunks."""
_EMPTY: Final = (b"\r\n", b"\n")
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) (\d{3})\s")
_CHUNK_HEAD: Final = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]{0,8}(?:;.{0,240})?\r?\n")
_DIGITS: Final = re.compile(rb"\d{1,12}")
_WORDS: Final = re.compile(rb"[^\s,]+")
_QUESTION: Final = (
    # This asks for the classic format of metrics, and for an uncompressed page: unpacking costs more CPU than
    # a local network.
    "{method} {target} HTTP/1.1\r\n"
    "Host: {host}\r\n"
    "Accept: text/plain;version=0.0.4, application/json\r\n"
    "Accept-Encoding: identity\r\n"
    "User-Agent: prefix-gateway-epp\r\n"
)
_PLAIN: Final = "; if it expects TLS: model servers are reached by plain HTTP"
_TLS_ALERT: Final = re.compile(r"\\+x15\\+x03")
"""How an error quotes the first bytes of the alert that a server with TLS sends on plain HTTP."""


class NoPageError(MetricsError):
    """The server gave no answer (the status is 0), or one without a body or with another status than 2xx."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Page(NamedTuple):
    body: bytes | bytearray
    keeps_open: bool
    """Whether the connection stays open for the next answer."""
    fields: Mapping[bytes, bytes]
    """The fields of the head. Names and values are in small letters."""


class AnswerStream(asyncio.StreamReader):
    """The bytes of one connection."""

    spare = b""
    """Bytes that were read after an answer, and that are no part of it."""

    @property
    def unread(self) -> bool:
        """Whether bytes came that no answer has used."""
        return bool(self.spare or self._buffer)  # type: ignore[attr-defined]  # asyncio's own name

    async def some(self) -> bytes:
        """Return what has come. Raises EOFError at the end of the connection."""
        if not (piece := await self.read(_READ_BYTES)):
            raise EOFError
        return piece


async def read_answer(stream: AnswerStream, *, most_bytes: int) -> Page:
    """Return the answer. Raises MetricsError if it has no page, or a page of more than `most_bytes`,
    ValueError if it is not HTTP, and ConnectionResetError if nothing came.
    """
    first = await stream.readline()
    if not first:
        raise ConnectionResetError
    if not first.startswith(b"HTTP/1."):
        raise ValueError(f"the answer is not HTTP/1: {first[:40]!r}")
    try:
        size, keeps_open, fields = _meaning(await _head(stream, first))
        if size == _CHUNKED:
            page: bytes | bytearray = await _chunks(stream, most_bytes=most_bytes)
        elif size is not None:
            _bound(size, most_bytes=most_bytes)
            page = await stream.readexactly(size)
        else:
            return Page(await _rest(stream, most_bytes=most_bytes), False, fields)
    except (OSError, EOFError) as error:
        raise NoPageError("the server ended the connection before the end of its answer") from error
    # Bytes after the answer, or fields after its chunks, belong to no question, so the connection closes.
    return Page(page, keeps_open and not stream.unread, fields)


async def _head(stream: AnswerStream, first: bytes) -> list[bytes]:
    """Return the lines of the answer's head. Heads with status 1xx before it are skipped. Lines may end
    without a carriage return (RFC 9112, 2.2).
    """
    lines, left = [first], _HEAD_BYTES - len(first)
    while True:
        line = await stream.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        left -= len(line)
        if left < 0 or len(lines) > _MOST_LINES:
            raise ValueError(
                f"the head of the answer has more than {_HEAD_BYTES} bytes or {_MOST_LINES} lines"
            )
        if line not in _EMPTY or not lines:
            lines.append(line)
        elif (status := _STATUS.match(lines[0])) and status[2][:1] == b"1" and status[2] != b"101":
            lines = []
        else:
            return lines


def _meaning(head: list[bytes]) -> tuple[int | None, bool, Mapping[bytes, bytes]]:
    """Return the size of the page, whether the connection stays open, and the fields. None: the page ends
    with the connection.
    """
    status = _STATUS.match(head[0])
    if status is None:
        raise ValueError(f"the answer has no status: {head[0][:40]!r}")
    if status[2][:1] != b"2" or status[2] == b"204":
        raise NoPageError(f"HTTP status {status[2].decode()}", status=int(status[2]))
    size, keeps_open, in_chunks = None, status[1] == b"1", False
    fields = {}
    for line in head[1:]:
        name, _, value = line.lower().partition(b":")
        value = fields[name] = value.strip()
        if name == b"transfer-encoding":
            if value != b"chunked":
                raise ValueError(f"the answer has the transfer encoding {value[:40]!r}")
            in_chunks = True
        elif name == b"content-length":
            if not _DIGITS.fullmatch(value) or size not in {None, int(value)}:
                raise ValueError(f"the answer has the length {value[:40]!r}")
            size = int(value)
        elif name == b"connection" and b"close" in _WORDS.findall(value):
            keeps_open = False
    return _CHUNKED if in_chunks else size, keeps_open, fields


async def _chunks(stream: AnswerStream, *, most_bytes: int) -> bytearray:
    page, held, at = bytearray(), b"", 0
    for number in range(_MOST_CHUNKS + 1):
        while (head := _CHUNK_HEAD.match(held, at)) is None:
            if b"\n" in held[at:] or len(held) - at > _CHUNK_LINE_BYTES:
                raise ValueError(f"a chunk has the size {held[at : at + 40]!r}")
            held, at = held[at:] + await stream.some(), 0
        size, at = int(head[1], 16), head.end()
        if not size:
            held = held[at:] + await stream.readexactly(max(0, at + 2 - len(held)))
            stream.spare = held.removeprefix(b"\r\n")
            return page
        if number >= _SMALL_CHUNKS and len(page) < number * _CHUNK_BYTES:
            raise MetricsError(f"the page comes in chunks of less than {_CHUNK_BYTES} bytes")
        _bound(len(page) + size, most_bytes=most_bytes)
        if (missing := at + size + 2 - len(held)) > 0:
            held, at = held[at:] + await stream.readexactly(missing), 0
        if held[at + size : at + size + 2] != b"\r\n":
            raise ValueError("a chunk does not end where it should")
        page += memoryview(held)[at : at + size]
        at += size + 2
        if number % _CHUNKS_A_TURN == _CHUNKS_A_TURN - 1:
            await asyncio.sleep(0)
    raise MetricsError(f"the page comes in more than {_MOST_CHUNKS} chunks")


async def _rest(stream: AnswerStream, *, most_bytes: int) -> bytearray:
    page = bytearray()
    while piece := await stream.read(_READ_BYTES):
        page += piece
        _bound(len(page), most_bytes=most_bytes)
    return page


def _bound(size: int, *, most_bytes: int) -> None:
    if size > most_bytes:
        raise MetricsError(f"the page has more than {most_bytes} bytes")


class PageClient:
    """The connection to one server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: tuple[asyncio.Transport, AnswerStream] | None = None

    async def ask(
        self,
        path: str,
        *,
        most_bytes: int,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes = b"",
    ) -> Page:
        """Ask for `path`, which includes the query if there is one. Raises what `read_answer` raises, and
        OSError if the server does not answer. headers: further headers. body: is sent by POST.
        """
        further = [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body:
            further.append(f"Content-Length: {len(body)}\r\n")
        head = _head_of("POST" if body else "GET", path, self._address)
        question = "".join((head, *further, "\r\n")).encode() + body
        if self._connection is not None and not self._ended(*self._connection):
            with contextlib.suppress(ConnectionResetError):
                # Suppressed: the server ended the connection while the question was on its way.
                return await self._ask(*self._connection, question, most_bytes=most_bytes)
        return await self._ask(*await self.connect(), question, most_bytes=most_bytes)

    def close(self) -> None:
        if self._connection is not None:
            self._connection[0].abort()
            self._connection = None

    @staticmethod
    def _ended(transport: asyncio.Transport, stream: AnswerStream) -> bool:
        return transport.is_closing() or stream.at_eof() or stream.unread or stream.exception() is not None

    async def _ask(
        self, transport: asyncio.Transport, stream: AnswerStream, question: bytes, *, most_bytes: int
    ) -> Page:
        transport.write(question)
        answer = None
        try:
            answer = await read_answer(stream, most_bytes=most_bytes)
        finally:
            if answer is None or not answer.keeps_open:
                self.close()
        return answer

    async def connect(self) -> tuple[asyncio.Transport, AnswerStream]:
        """Open a new connection, for the next question. Raises NoPageError."""
        self.close()
        loop = asyncio.get_running_loop()
        host, port = self._address.host, self._address.port
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        stream = AnswerStream()
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ_BYTES)
            await loop.sock_connect(made, (host, port))
            transport, _ = await loop.create_connection(
                lambda: asyncio.StreamReaderProtocol(stream), sock=made
            )
        except OSError as error:
            made.close()
            why = os.strerror(error.errno) if error.errno else str(error)
            raise NoPageError(f"cannot connect to port {port}: {why}") from error
        except BaseException:
            made.close()
            raise
        self._connection = transport, stream
        return self._connection


@lru_cache(maxsize=4096)
def _head_of(method: str, path: str, address: Address) -> str:
    """Return the lines that each question for this page begins with."""
    target = URL(f"http://{address}{path}").raw_path_qs
    return _QUESTION.format(method=method, target=target, host=address)


def in_words(error: Exception) -> str:
    """Return why a question failed, on one line, and without text of any length: some errors quote the
    server.
    """
    quoted = str(error)
    if isinstance(error, ConnectionResetError):
        text = f"the server ended the connection without an answer{_PLAIN}"
    else:
        whose = "" if isinstance(error, MetricsError) else f"{type(error).__name__}: "
        text = f"{whose}{quoted}{_PLAIN if _TLS_ALERT.search(quoted) else ''}"
    return " ".join(text.split())[:300]


# -- the key -------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_MOST_KEY_BYTES: Final = 4096
_KEY: Final = re.compile(rb"[!-~]+")


class ApiKey:
    """The API key of the model servers, in a file. The file is read at each question, so a renewed key is
    used. Neither the log nor an error shows the key.
    """

    def __init__(self, path: str) -> None:
        """path: empty if the servers want no key."""
        self._path = path
        self._fault = ""

    def fault(self) -> str:
        """Return what is wrong with the file. Empty: nothing."""
        return self._read()[1] if self._path else ""

    def headers(self) -> dict[str, str]:
        """Return the header of a question, which has the key. Empty: the servers want none, or the file
        cannot be used.
        """
        key, fault = self._read() if self._path else ("", "")
        if fault and fault != self._fault:
            _log.error("model servers are asked without a key: models.apiKeyFile: %s", fault)
        self._fault = fault
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _read(self) -> tuple[str, str]:
        try:
            with Path(self._path).open("rb") as file:
                key = file.read(_MOST_KEY_BYTES + 1).strip()
        except OSError as error:
            return "", f"{self._path}: {error.strerror}; {to_do(error)}"
        if len(key) > _MOST_KEY_BYTES or not _KEY.fullmatch(key):
            return "", f"{self._path}: the file has to hold one key of printable ASCII, and nothing else"
        return key.decode(), ""
