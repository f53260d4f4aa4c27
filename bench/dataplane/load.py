"""Sends the load: raw HTTP/1.1 on kept connections, a fixed number of requests in flight, and prompts made
beforehand. The client measures the time from writing a request to the first byte of the answer's body. The
client fails on any answer but 200.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

_NONCE_CHARS: Final = 16
_ANSWER_TIMEOUT_S: Final = 60.0
_SYSTEM: Final = "You are a careful assistant. "


class BadAnswerError(Exception):
    """An answer was not 200, or did not come. The figures would then be worthless."""


class Prompts:
    """Chat requests whose bodies are `size_bytes` long, and differ from their first bytes on."""

    def __init__(self, *, size_bytes: int, chunks: int, seed: int) -> None:
        rng = random.Random(seed)
        before = json.dumps({"model": "m", "stream": chunks > 1})[:-1].encode()
        before += b', "messages": [{"role": "system", "content": "' + _SYSTEM.encode()
        middle = b'"}, {"role": "user", "content": "'
        end = b'"}]}'
        around = len(before) + len(middle) + len(end) + _NONCE_CHARS
        text = _text(size_bytes - around, rng)
        length = around + len(text)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            f"user-agent: bench\r\nauthorization: Bearer none\r\naccept: */*\r\nx-chunks: {chunks}\r\n"
            f"content-length: {length}\r\n\r\n"
        ).encode()
        self._before, self._after = head + before, middle + text + end
        self._numbers = itertools.count(rng.getrandbits(48))

    def next(self) -> Sequence[bytes]:
        """Return the bytes of one request."""
        return (self._before, b"%0*x" % (_NONCE_CHARS, next(self._numbers)), self._after)


def _text(size_bytes: int, rng: random.Random) -> bytes:
    """Return random words as the content of a JSON string. Some have escaped line ends or quotes, or letters
    beyond ASCII.
    """
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    words += ["naïve", "Zürich", '\\"so\\"', "end.\\n"] * 30
    parts, have = [], 0
    while have < size_bytes:
        word = rng.choice(words).encode() + b" "
        parts.append(word)
        have += len(word)
    whole = b"".join(parts)
    cut = whole[: whole.rindex(b" ", 0, size_bytes + 1)]
    return cut + b" " * (size_bytes - len(cut))


class Connection(asyncio.Protocol):
    """Carries one request at a time over one connection."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[float] | None = None
        self._head = b""
        self._in_body = False
        self._left: int | None = None
        self._tail = b""
        self._started = 0.0
        self._first_byte_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own class, which is not a subclass of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc}")

    def close(self) -> None:
        self._transport.close()

    async def request(self, parts: Sequence[bytes]) -> float:
        """Send one request. When the whole answer has come, return the seconds to the first byte of the
        body.
        """
        waiting: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        self._head, self._in_body, self._left, self._tail = b"", False, None, b""
        self._started = time.perf_counter()
        self._transport.writelines(parts)
        return await waiting

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._fail(f"answered {self._head[:500]!r}")
                return
            self._in_body, self._first_byte_s = True, 0.0
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self._left = int(length) if length else None
        if data:
            self._take_body(data)

    def _take_body(self, data: bytes) -> None:
        if not self._first_byte_s:
            self._first_byte_s = time.perf_counter() - self._started
        if self._left is not None:
            self._left -= len(data)
            over = self._left == 0
        else:
            self._tail = (self._tail + data[-5:])[-5:]
            over = self._tail == b"0\r\n\r\n"
        if over and self._waiting is not None:
            if not self._waiting.done():  # the future is done if the run was cancelled
                self._waiting.set_result(self._first_byte_s)
            self._waiting = None

    def _fail(self, why: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(BadAnswerError(why))
        self._waiting = None


@dataclass(slots=True)
class Burst:
    """The results of one turn of a variant."""

    seconds: float = 0.0
    first_bytes_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.first_bytes_s)


class Client:
    """Sends requests over kept connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[Connection] = []

    async def burst(
        self, prompts: Prompts, *, in_flight: int, seconds: float, spread_s: float = 0.0
    ) -> Burst:
        """Keep `in_flight` requests open. The first ones start over `spread_s`. No request begins after
        `seconds`. Every connection sends at least one request.
        """
        await self._connect(in_flight)
        result = Burst()
        started = time.perf_counter()
        deadline = started + seconds

        async def lane(number: int, connection: Connection) -> None:
            await asyncio.sleep(spread_s * number / in_flight)
            while True:
                result.first_bytes_s.append(await connection.request(prompts.next()))
                if time.perf_counter() >= deadline:
                    return

        async with asyncio.timeout(seconds + _ANSWER_TIMEOUT_S):
            await asyncio.gather(*(lane(n, c) for n, c in enumerate(self._connections[:in_flight])))
        result.seconds = time.perf_counter() - started
        return result

    async def one(self, prompts: Prompts) -> float:
        """Send a single request while no other request is in flight. Return the seconds to the first byte of
        its answer.
        """
        await self._connect(1)
        return await self._connections[0].request(prompts.next())

    def close(self) -> None:
        """Close the connections. Each variant opens new connections for its turn, because servers close idle
        connections.
        """
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def _connect(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        while len(self._connections) < count:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
            self._connections.append(connection)
