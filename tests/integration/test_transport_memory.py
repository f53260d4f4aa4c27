"""The C heap of a picker stays flat over 25,000 streams that the data plane resets, as Envoy ends every
request. The connection has no socket, and its time is simulated.
"""

import asyncio
import ctypes
import gc
import os
import time

import pytest

from epp.base.types import EndpointMetrics
from epp.config.sections import Listen
from epp.protocol.settings import StreamSettings
from epp.transport.http2.frames import Kind
from epp.transport.peer import Peer
from epp.transport.server import ExtProcServer
from tests.harness.http2_frames import NO_TABLE, block, data, grpc, hello, reset, split, window_update
from tests.harness.http2_frames import headers as headers_frame
from tests.harness.pipe import Pipe
from tests.integration.test_extproc_server import headers, picker_of_three

_WARMING_STREAMS = 5_000
_STREAMS = int(os.environ.get("PREFIX_GATEWAY_HEAP_STREAMS", "25000"))
_AT_ONCE = 100
_MOST_BYTES_A_STREAM = 8


class _Info(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _heap() -> int:
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Info
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


class _DataPlane:
    """One connection with its streams."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._picker = picker_of_three()
        server = ExtProcServer(
            self._picker, listen=Listen(), settings=StreamSettings(), clock=lambda: self._now
        )
        self._pipe = Pipe()
        self._peer = Peer(server.transport)  # type: ignore[arg-type]  # it is our HTTP/2
        self._peer.connection_made(self._pipe)
        self._peer.data_received(hello(window=2**20) + window_update(0, 2**30))
        self._next = 1
        self._block = block()
        self._message = grpc(headers(mode=0).SerializeToString())

    async def open_and_reset(self, streams: int) -> None:
        for _ in range(streams // _AT_ONCE):
            numbers = range(self._next, self._next + 2 * _AT_ONCE, 2)
            self._next += 2 * _AT_ONCE
            await self._send(b"".join(map(self._opening, numbers)))
            assert sum(frame.kind == Kind.DATA for frame in split(self._pipe.written)) == _AT_ONCE
            await self._send(b"".join(map(reset, numbers)))
            self._pipe.writes.clear()
            self._now += 0.1
            # Requests that are let go unread are counted by scrapes, as in a picker that serves.
            for state in self._picker.fleet.states():
                page = EndpointMetrics(scraped_at=self._now)
                self._picker.news.observe(state.endpoint.name, page, now=self._now)

    async def _send(self, wire: bytes) -> None:
        self._peer.data_received(wire)
        await asyncio.sleep(0)

    def _opening(self, number: int) -> bytes:
        first = NO_TABLE + self._block if number == 1 else self._block
        return headers_frame(number, first) + data(number, self._message)


@pytest.mark.slow
async def test_streams_that_the_data_plane_resets_leave_nothing_in_the_heap() -> None:
    plane, heaps = _DataPlane(), []
    for streams in (_WARMING_STREAMS, _STREAMS):
        await plane.open_and_reset(streams)
        heaps.append(_heap())
    grown = (heaps[1] - heaps[0]) / _STREAMS
    print(f"{_STREAMS} streams, {grown:.1f} bytes of C heap each")
    assert grown < _MOST_BYTES_A_STREAM, heaps
