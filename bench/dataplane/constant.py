"""Runs the floor of our own transport: `epp.http2` on its event loop, which answers ext_proc's messages with
constants.

    python -m bench.dataplane.constant unix:/PATH ADDRESS...

This server reads no header and no body, and books nothing. So the time that a request waits for its answers
comes from the machine, from Envoy and from the transport.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import uvloop
from grpc_health.v1 import health_pb2

from bench.dataplane.floor import PLAIN, REQUEST_BODY, destination
from epp.extproc.calls import Handler
from epp.extproc.conversation import SERVICE
from epp.extproc.http2_server import Http2Server
from epp.extproc.http_events import Slot
from epp.extproc.peer import Call
from epp.http2.limits import Limits
from epp.serve.process import tune


class _Constant(Handler):
    __slots__ = ("_call", "_on_body")

    def __init__(self, call: Call, on_body: Iterator[bytes]) -> None:
        self._call = call
        self._on_body = on_body

    def message(self, data: bytes, *, now: float) -> None:
        self._call.send(next(self._on_body) if data[0] == REQUEST_BODY else PLAIN[data[0]])

    def half_closed(self, *, now: float) -> None:
        self._call.end()

    def gone(self, *, now: float, broken: bool) -> None: ...


class _Healthy(Handler):
    """Answers Envoy's health check."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def message(self, data: bytes, *, now: float) -> None:
        self._call.send(health_pb2.HealthCheckResponse(status=1).SerializeToString())
        self._call.end()

    def half_closed(self, *, now: float) -> None: ...
    def gone(self, *, now: float, broken: bool) -> None: ...


def _forget(*_: object, **__: object) -> None:
    """Ignore the faults of peers that the server reports."""


async def _serve(path: str, addresses: Sequence[str]) -> None:
    on_body = itertools.cycle([destination(Slot.REQUEST_BODY, a) for a in addresses])
    server = Http2Server(
        {
            f"/{SERVICE}/Process": lambda call: _Constant(call, on_body),
            "/grpc.health.v1.Health/Check": _Healthy,
        },
        limits=Limits(max_message_bytes=2**26),
        max_held_bytes=2**27,
        max_peers=100,
        clock=time.monotonic,
        on_fault=_forget,
        after_writing=_forget,
    )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen()
    server.start(sock)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    tune()
    uvloop.run(_serve(sys.argv[1].removeprefix("unix:"), sys.argv[2:]))
