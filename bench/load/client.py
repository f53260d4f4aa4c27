"""Sends the load: one streamed POST at a time on a kept connection. Keeps the pieces of the answer with their
times. The client runs on gevent, for locust's users. geventhttpclient's C parser parses HTTP, and nothing
else happens between two pieces. Each kind of failed answer has its own class (docs/load-tests.md lists them).
"""

import time
from typing import Final
from urllib.parse import urlsplit

import gevent.socket
from geventhttpclient.connectionpool import ConnectionPool, SSLConnectionPool
from geventhttpclient.response import HTTPParseError, HTTPResponse

from bench.load.sse import AnswerError

_CONNECTIONS: Final = 100_000
"""No user waits for a connection of another."""
_CONNECT_WITHIN_S: Final = 10.0
_READ_BYTES: Final = 65_536

Piece = tuple[float, bytes]


class _Reader(HTTPResponse):
    """Keeps each piece of the body with the time when its bytes were read."""

    def __init__(self) -> None:
        super().__init__(method="POST")
        self.now = 0.0
        self.pieces: list[Piece] = []

    def _on_body(self, buf: bytearray) -> None:
        self.pieces.append((self.now, bytes(buf)))

    @property
    def ends_with_connection(self) -> bool:
        return self.headers_complete and "content-length" not in self and "transfer-encoding" not in self


class Client:
    """Sends the requests of all users of a process to one server."""

    def __init__(self, url: str, *, path: str, silence_s: float) -> None:
        """`silence_s` is the longest time without a byte. After a longer silence the request has failed."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        kind = SSLConnectionPool if tls else ConnectionPool
        self._pool = kind(
            host,
            port,
            host,
            port,
            size=_CONNECTIONS,
            connection_timeout=_CONNECT_WITHIN_S,
            network_timeout=silence_s,
        )
        self._silence_s = silence_s
        target = parts.path.rstrip("/") + path
        self._head = f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"

    def post(self, body: bytes, *, headers: str = "") -> list[Piece]:
        """Return the pieces of a whole answer with status 200. Raise AnswerError for any other answer.
        `headers` are further headers, each with its line end.
        """
        sock = self._connect()
        reader = _Reader()
        try:
            self._exchange(sock, body, reader, headers)
        except BaseException:
            self._pool.release_socket(sock)
            raise
        if reader.should_close():
            self._pool.release_socket(sock)
        else:
            self._pool.return_socket(sock)
        if reader.status_code != 200:
            text = b"".join(piece for _, piece in reader.pieces)[:300].decode(errors="replace")
            raise AnswerError(f"status {reader.status_code}", text)
        return reader.pieces

    def _connect(self) -> gevent.socket.socket:
        try:
            return self._pool.get_socket()
        except ConnectionRefusedError as error:
            raise AnswerError("refused", str(error)) from error
        except OSError as error:
            raise AnswerError("no connection", f"{type(error).__name__}: {error}") from error

    def _exchange(self, sock: gevent.socket.socket, body: bytes, reader: _Reader, headers: str) -> None:
        """Read until the message is complete by HTTP."""
        try:
            sock.sendall(f"{self._head}{headers}content-length: {len(body)}\r\n\r\n".encode() + body)
            while not reader.message_complete:
                data = sock.recv(_READ_BYTES)
                reader.now = time.monotonic()
                if not data:
                    if reader.ends_with_connection:
                        return
                    begun = "in the middle of" if reader.headers_complete else "before"
                    raise AnswerError("cut", f"the connection ended {begun} the answer")
                reader.feed(data)
        except TimeoutError as error:
            raise AnswerError("silent", f"no byte for {self._silence_s:g} s") from error
        except HTTPParseError as error:
            raise AnswerError("malformed", f"not HTTP: {error}") from error
        except OSError as error:
            raise AnswerError("cut", f"{type(error).__name__}: {error}") from error
