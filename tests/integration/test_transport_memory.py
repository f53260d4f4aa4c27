"""The C heap of a picker stays flat over 25,000 streams that the data plane resets, as Envoy ends every
request.

The client is not a gRPC library. It writes the same frames again with other stream numbers, on one
connection.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from epp.transport.http2.frames import Flag, Kind
from tests.harness.http2_frames import NO_TABLE, block, data, grpc, hello, ping, reset, window_update
from tests.harness.http2_frames import headers as headers_frame
from tests.integration.test_extproc_server import headers

_WARMING_STREAMS = 5_000
_STREAMS = int(os.environ.get("PREFIX_GATEWAY_HEAP_STREAMS", "25000"))
_AT_ONCE = 100
_MOST_BYTES_A_STREAM = 8

_SERVER = """
import asyncio, ctypes, gc, sys, time
from epp.config.listening import Listen
from epp.base.types import EndpointMetrics
from epp.protocol.asking import StreamSettings
from epp.transport.server import ExtProcServer
from tests.harness.seen import Seen
from tests.integration.test_extproc_server import picker_of_three


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info


def heap():
    gc.collect()
    found = mallinfo()
    return found.uordblks + found.hblkhd


async def scrapes(picker):
    # Requests that are let go unread are counted by scrapes, as in a picker that serves.
    while True:
        await asyncio.sleep(0.1)
        now = time.monotonic()
        for state in picker.fleet.states():
            picker.observe(state.endpoint.name, EndpointMetrics(scraped_at=now), now=now)


async def serve():
    picker = picker_of_three()
    listen = Listen(address="127.0.0.1:0")
    server = ExtProcServer(picker, listen=listen, settings=StreamSettings())
    await server.start()
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    scraping = loop.create_task(scrapes(picker))
    while await loop.run_in_executor(None, sys.stdin.readline):
        while server.streams:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        print(heap(), flush=True)


asyncio.run(serve())
"""


class _DataPlane:
    """One connection with its streams."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(hello(window=2**20) + window_update(0, 2**30))
        self._sock = sock
        self._last = -1
        self._buffer = b""
        self._block = block()
        self._message = data(0, grpc(headers(mode=0).SerializeToString()))

    def open_and_reset(self, streams: int) -> None:
        for _ in range(streams // _AT_ONCE):
            numbers = range(self._last + 2, self._last + 2 + 2 * _AT_ONCE, 2)
            self._sock.sendall(b"".join(map(self._opening, numbers)))
            self._last = numbers[-1]
            answered = 0
            while answered < _AT_ONCE:
                answered += self._read()
            self._sock.sendall(b"".join(map(reset, numbers)))

    def _opening(self, number: int) -> bytes:
        first = headers_frame(number, NO_TABLE + self._block if number == 1 else self._block)
        return first + self._message[:5] + number.to_bytes(4) + self._message[9:]

    def _read(self) -> int:
        """Return the answers that came."""
        self._buffer += self._sock.recv(2**18)
        buffer, at, answers = self._buffer, 0, 0
        while len(buffer) >= at + 9 and len(buffer) >= (end := at + 9 + int.from_bytes(buffer[at : at + 3])):
            kind, flags = buffer[at + 3], buffer[at + 4]
            answers += kind == Kind.DATA
            if kind == Kind.PING and not flags & Flag.ACK:
                self._sock.sendall(ping(buffer[at + 9 : end], ack=True))
            at = end
        self._buffer = buffer[at:]
        return answers


@contextmanager
def _serving() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.slow
def test_streams_that_the_data_plane_resets_leave_nothing_in_the_heap() -> None:
    heaps = []
    with _serving() as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=280) as sock:
            plane = _DataPlane(sock)
            for streams in (_WARMING_STREAMS, _STREAMS):
                plane.open_and_reset(streams)
                server.stdin.write("\n")
                server.stdin.flush()
                heaps.append(int(server.stdout.readline()))
    grown = (heaps[1] - heaps[0]) / _STREAMS
    print(f"{_STREAMS} streams, {grown:.1f} bytes of C heap each")
    assert grown < _MOST_BYTES_A_STREAM, heaps
