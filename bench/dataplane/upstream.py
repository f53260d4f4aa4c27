"""Runs model servers that cost almost nothing: one process gives fixed answers on many addresses, and
computes nothing.

    python -m bench.dataplane.upstream ADDRESS...

`x-chunks: N` in the request asks for an answer of N server-sent events, one each tick of `TICK_S`, the first
at once with the headers. Without this header, or with 1, the answer is one JSON object. `GET /metrics`
returns a small page with vLLM's names.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, cast

import uvloop

from epp.serve.process import raise_file_limit

TICK_S: Final = 0.001

_EVENT: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_WHOLE_BODY: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"word"},"finish_reason":"stop"}]}'
)
_METRICS: Final = b"".join(
    b'%b{model_name="m",engine="0"} %d\n' % (name, value)
    for name, value in (
        (b"vllm:num_requests_running", 0),
        (b"vllm:num_requests_waiting", 0),
        (b"vllm:kv_cache_usage_perc", 0),
    )
)
_END_OF_CHUNKS: Final = b"0\r\n\r\n"


def _whole(content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (content_type, len(body))
    return head + body


_WHOLE: Final = _whole(b"application/json", _WHOLE_BODY)
_PAGE: Final = _whole(b"text/plain", _METRICS)


class Pacer:
    """Writes one event to each unfinished answer at every tick."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Transport, int] = {}
        self._ticking = False

    def begin(self, transport: asyncio.Transport, chunks: int) -> None:
        transport.write(_STREAM_HEAD + _CHUNK)
        self._left[transport] = chunks - 1
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def forget(self, transport: asyncio.Transport) -> None:
        self._left.pop(transport, None)

    def _tick(self) -> None:
        left = self._left
        for transport, count in list(left.items()):
            if count > 1:
                left[transport] = count - 1
                transport.write(_CHUNK)
            else:
                del left[transport]
                transport.write(_CHUNK + _DONE)
        self._ticking = bool(left)
        if left:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)


class _Connection(asyncio.Protocol):
    """Handles one request after the other. Bodies are counted and thrown away."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._head = b""
        self._chunks = 0
        self._body_left = 0
        self._tail: bytes | None = None
        """The end of a body that came without a length. None means that the body has a length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own class, which is not a subclass of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pacer.forget(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._body_left or self._tail is not None:
            self._take_body(data)
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return
        head, rest = self._head[:end].lower(), self._head[end + 4 :]
        self._head = b""
        if head.startswith(b"get /metrics"):
            self._transport.write(_PAGE)
            return
        self._chunks = int(_field(head, b"x-chunks") or 1)
        length = _field(head, b"content-length")
        self._body_left, self._tail = (int(length), None) if length else (0, b"")
        self._take_body(rest)

    def _take_body(self, data: bytes) -> None:
        if self._tail is None:
            self._body_left -= len(data)
            if self._body_left:
                return
        else:
            self._tail = (self._tail + data[-len(_END_OF_CHUNKS) :])[-len(_END_OF_CHUNKS) :]
            if self._tail != _END_OF_CHUNKS:
                return
            self._tail = None
        if self._chunks > 1:
            self._pacer.begin(self._transport, self._chunks)
        else:
            self._transport.write(_WHOLE)


def _field(head: bytes, name: bytes) -> bytes:
    """Return the value of a header, or an empty value if there is none."""
    return head.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


async def _serve(addresses: Sequence[str]) -> None:
    loop, pacer = asyncio.get_running_loop(), Pacer()
    for address in addresses:
        host, _, port = address.rpartition(":")
        await loop.create_server(lambda: _Connection(pacer), host, int(port))
    await loop.create_future()


if __name__ == "__main__":
    raise_file_limit()
    uvloop.run(_serve(sys.argv[1:]))
