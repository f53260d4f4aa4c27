"""The C heap of a picker over thousands of streams that the data plane resets, as Envoy ends every request: it must stay flat."""

from __future__ import annotations

import subprocess
import sys

import pytest

_STREAMS = 4000

_SCRIPT = """
import asyncio, ctypes, gc, sys
import grpc
from epp.config.settings import Listen
from epp.extproc.response import StreamSettings
from epp.extproc.server import ExtProcServer
from tests.harness.seen import Seen
from tests.integration.test_extproc_server import METHOD, headers, make_picker


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info


def heap():
    gc.collect()
    found = mallinfo()
    return found.uordblks + found.hblkhd


async def client(target, count):
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream(METHOD)
        message = headers(mode=0).SerializeToString()
        for _ in range(count // 20):
            open_calls = [call() for _ in range(20)]
            for one in open_calls:
                await one.write(message)
                await one.read()
            for one in open_calls:
                one.cancel()


async def serve(transport):
    picker = make_picker()
    seen = Seen.of(picker)
    server = ExtProcServer(picker, seen, listen=Listen(address="127.0.0.1:0", transport=transport), settings=StreamSettings())
    await server.start()
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        while server.streams:
            await asyncio.sleep(0.01)
        seen.picks.clear(), seen.over.clear()
        print(heap(), flush=True)


if sys.argv[1] == "serve":
    asyncio.run(serve(sys.argv[2]))
else:
    asyncio.run(client(sys.argv[2], int(sys.argv[3])))
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
            target = f"127.0.0.1:{server.stdout.readline().strip()}"
            heaps = []
            for _ in range(3):
                subprocess.run([*command, "client", target, str(_STREAMS)], check=True, timeout=280)
                server.stdin.write("\n")
                server.stdin.flush()
                heaps.append(int(server.stdout.readline()))
        finally:
            server.kill()
    # The first lot fills caches and tables. grpc.aio left 100 bytes of each stream behind (grpc/grpc#43360).
    grown = (heaps[2] - heaps[1]) / _STREAMS
    assert grown < 40, heaps
