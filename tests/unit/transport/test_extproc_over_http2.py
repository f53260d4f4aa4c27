"""Health and access logs on our own HTTP/2, without a socket."""

import asyncio
from collections import defaultdict

import pytest
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from grpc_health.v1 import health_pb2
from hpack import Decoder

from epp.config.sections import Listen
from epp.protocol.access_log import METHOD as LOG
from epp.protocol.settings import StreamSettings
from epp.transport.http2.frames import Kind
from epp.transport.http2.messages import INTERNAL, OK
from epp.transport.peer import Peer
from epp.transport.server import ExtProcServer
from tests.harness.http2_frames import block, data, grpc, headers, hello, messages_in, reset, split
from tests.harness.pipe import Pipe
from tests.invariants.transport import check_peer
from tests.unit.protocol.stream_bench import Bench

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


def health_question(service: str) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())


class DataPlane:
    """A data plane with one connection to the picker. It collects the answers and the end of each call."""

    def __init__(self) -> None:
        bench = Bench()
        server = ExtProcServer(bench.picker, listen=Listen(), settings=StreamSettings(), clock=lambda: 1.0)
        self.health = server.health
        self.ends: dict[int, int] = {}
        """gRPC's status of each call that has ended."""
        self.received: defaultdict[int, bytes] = defaultdict(bytes)
        self._decoder = Decoder()
        self._pipe = Pipe()
        self._peer = Peer(server.transport)  # type: ignore[arg-type]  # it is our HTTP/2
        self._peer.connection_made(self._pipe)
        self._peer.data_received(hello())

    async def call(self, number: int, path: str, *messages: bytes, ends: bool = False) -> None:
        wire = headers(number, block(replace=[(":path", path)]))
        await self.send(wire + data(number, b"".join(map(grpc, messages)), ends=ends))

    async def send(self, wire: bytes = b"") -> None:
        """Send bytes, and read what the picker has written."""
        self._peer.data_received(wire)
        await asyncio.sleep(0)
        check_peer(self._peer)
        for frame in split(self._pipe.written):
            if frame.kind == Kind.DATA:
                self.received[frame.number] += frame.payload
            elif frame.kind == Kind.HEADERS:
                fields = {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}
                if frame.ends:
                    self.ends[frame.number] = int(fields["grpc-status"])
        self._pipe.writes.clear()

    def statuses(self, number: int) -> list[int]:
        """Return the statuses of health that a call got."""
        found = messages_in(self.received[number])
        assert found is not None
        return [health_pb2.HealthCheckResponse.FromString(message).status for message in found]


async def test_a_watch_gets_each_change_until_its_caller_leaves() -> None:
    data_plane = DataPlane()
    await data_plane.call(1, WATCH, health_question("readiness"))
    await data_plane.call(3, WATCH, health_question("liveness"))
    data_plane.health.set_ready(ready=True)
    await data_plane.send()
    assert data_plane.statuses(1) == [NOT_SERVING, SERVING]
    assert len(data_plane.health.watching) == 2
    await data_plane.send(reset(1))
    assert len(data_plane.health.watching) == 1
    data_plane.health.set_ready(ready=False)
    await data_plane.send()
    assert (data_plane.statuses(1), data_plane.statuses(3)) == ([NOT_SERVING, SERVING], [SERVING])
    assert data_plane.ends == {}


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_bytes_that_are_no_question_and_no_question_at_all_end_the_call(path: str) -> None:
    data_plane = DataPlane()
    await data_plane.call(1, path, b"\xff\xff")
    await data_plane.call(3, path, ends=True)
    await data_plane.call(5, path, health_question("s" * 1_024))
    assert data_plane.ends == {1: INTERNAL, 3: INTERNAL, 5: INTERNAL}
    assert data_plane.statuses(1) == data_plane.statuses(3) == []


async def test_a_second_question_ends_a_watch() -> None:
    data_plane = DataPlane()
    await data_plane.call(1, WATCH, health_question("readiness"), health_question("liveness"))
    data_plane.health.set_ready(ready=True)
    await data_plane.send()
    assert (data_plane.statuses(1), data_plane.ends) == ([NOT_SERVING], {1: INTERNAL})
    assert len(data_plane.health.watching) == 0


async def test_access_logs_are_answered_at_their_end_however_many_are_open() -> None:
    data_plane = DataPlane()
    for number in range(1, 601, 2):  # Each thread of an Envoy has one.
        await data_plane.call(number, LOG, StreamAccessLogsMessage().SerializeToString())
    assert data_plane.ends == {}
    await data_plane.send(data(1, ends=True) + reset(3) + data(599, ends=True))
    assert data_plane.ends == {1: OK, 599: OK}
    assert data_plane.received == {1: grpc(b""), 599: grpc(b"")}
