"""The C heap of a picker over thousands of streams that the data plane resets, as Envoy ends every request: it must stay flat."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_WARMING_STREAMS = 5_000
_STREAMS = int(os.environ.get("PREFIX_GATEWAY_HEAP_STREAMS", "20000"))
"""Half a minute for both transports; by hand 50,000."""

_SCRIPT = """
import asyncio, ctypes, gc, socket, sys
from epp.config.settings import Listen
from epp.extproc.response import StreamSettings
from epp.extproc.server import ExtProcServer
from tests.harness.seen import Seen
from epp.http2.frames import Flag, Kind
from tests.harness.http2_frames import NO_TABLE, block, data, grpc, hello, ping, reset, window_update
from tests.harness.http2_frames import headers as headers_frame
from tests.integration.test_extproc_server import headers, make_picker

AT_ONCE = 50
BLOCK = block()


def opening(number):
    return headers_frame(number, NO_TABLE + BLOCK if number == 1 else BLOCK)


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info


def heap():
    gc.collect()
    found = mallinfo()
    return found.uordblks + found.hblkhd


def client(port, count):
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(hello(window=2**20) + window_update(0, 2**30))
        message, buffer, number = data(0, grpc(headers(mode=0).SerializeToString())), b"", -1
        for _ in range(count // AT_ONCE):
            numbers = range(number + 2, number + 2 + 2 * AT_ONCE, 2)
            number = numbers[-1]
            sock.sendall(b"".join(opening(n) + message[:5] + n.to_bytes(4) + message[9:] for n in numbers))
            answered = 0
            while answered < AT_ONCE:
                buffer += sock.recv(2**18)
                while len(buffer) >= 9 and len(buffer) >= (size := 9 + int.from_bytes(buffer[:3])):
                    kind, flags, payload, buffer = buffer[3], buffer[4], buffer[9:size], buffer[size:]
                    answered += kind == Kind.DATA
                    if kind == Kind.PING and not flags & Flag.ACK:
                        sock.sendall(ping(payload, ack=True))
            sock.sendall(b"".join(reset(n) for n in numbers))


class Forgetful(Seen):
    def picked(self, pick, *, seconds, trace=""): ...


async def serve(transport):
    seen = Forgetful()
    server = ExtProcServer(make_picker(), seen, listen=Listen(address="127.0.0.1:0", transport=transport), settings=StreamSettings())
    await server.start()
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        while server.streams:
            await asyncio.sleep(0.01)
        print(heap(), flush=True)


if sys.argv[1] == "serve":
    asyncio.run(serve(sys.argv[2]))
else:
    client(int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_streams_that_the_data_plane_resets_leave_nothing_in_the_heap(transport: str) -> None:
    command = [sys.executable, "-c", _SCRIPT]
    with subprocess.Popen(
        [*command, "serve", transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port, heaps = server.stdout.readline().strip(), []
            for streams in (_WARMING_STREAMS, _STREAMS):
                subprocess.run([*command, "client", port, str(streams)], check=True, timeout=280)
                server.stdin.write("\n")
                server.stdin.flush()
                heaps.append(int(server.stdout.readline()))
        finally:
            server.kill()
    # The first lot fills caches and tables. grpc.aio left 100 bytes of each stream behind (grpc/grpc#43360).
    grown = (heaps[1] - heaps[0]) / _STREAMS
    assert grown < 40, heaps
