"""Our HTTP/2 on real sockets, with peers that misbehave."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.config.sections import Listen
from epp.transport import http2_server
from epp.transport import peer as peer_module
from epp.transport.http2.frames import Setting, settings
from tests.harness.certificate import write_tls
from tests.harness.http2_frames import (
    data,
    headers,
    hello,
    window_update,
)
from tests.harness.http2_frames import grpc as message
from tests.harness.processes import wait_until
from tests.integration.test_extproc_server import (
    ServerRig,
    never_overloaded,
    response_headers,
    serving_picker,
)
from tests.integration.test_extproc_server import headers as request_headers


@contextlib.asynccontextmanager
async def connected(
    rig: ServerRig, context: ssl.SSLContext | None = None, *, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = rig.target.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host,
        int(port),
        ssl=context,
        server_hostname="localhost" if context else None,
        local_addr=(address, 0),
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_a_peer_that_never_speaks_tls_is_counted(tmp_path: Path) -> None:
    async with serving_picker(listen=Listen(address="127.0.0.1:0", tls=write_tls(tmp_path))) as rig:
        async with connected(rig) as (reader, writer):
            writer.write(hello())
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 60)
        await wait_until(lambda: "tls_handshake" in rig.seen.faults, what="the fault is counted")


async def test_a_peer_that_never_reads_is_not_read_from_and_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer asks for its body back and never reads the answers. The bytes that we hold for the peer are
    bounded.
    """
    monkeypatch.setattr(http2_server, "_TICK_S", 0.02)
    monkeypatch.setattr(peer_module, "_UNREAD_S", 0.2)
    async with serving_picker() as rig, connected(rig) as (_, writer):
        transport = rig.server.transport
        (peer,) = await peers(transport)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # every asyncio transport has it
        first = request_headers(0)
        first.protocol_config.response_body_mode = 4  # full duplex
        piece = ext_proc.ProcessingRequest(response_body={"body": bytes(15_000)})
        writer.write(hello(window=2**30) + window_update(0, 2**30) + headers(1))
        writer.write(b"".join(data(1, message(m.SerializeToString())) for m in (first, response_headers())))
        held = 0
        async with asyncio.timeout(60):
            while "peer_never_reads" not in rig.seen.faults:
                writer.write(data(1, message(piece.SerializeToString())))
                await asyncio.sleep(0.001)
                if peer.transport is not None:
                    held = max(held, peer.transport.get_write_buffer_size())
        assert held < 8 * 2**20
        await rig.settled()
        assert rig.in_flight() == 0


async def peers(server: Any) -> list[peer_module.Peer]:
    await wait_until(lambda: server.peers, what="a peer is connected")
    return list(server.peers)


async def test_handshakes_that_stall_give_way_to_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_HANDSHAKES", 3)
    monkeypatch.setattr(http2_server, "_HANDSHAKE_S", 600.0)
    tls = write_tls(tmp_path)
    async with (
        serving_picker(listen=Listen(address="127.0.0.1:0", tls=tls)) as rig,
        contextlib.AsyncExitStack() as stack,
    ):
        stalled = [await stack.enter_async_context(connected(rig)) for _ in range(6)]
        context = ssl.create_default_context(cafile=tls.cert_file)
        await stack.enter_async_context(connected(rig, context))
        for reader, _ in stalled[:3]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        assert not stalled[5][0].at_eof()


@pytest.mark.slow
async def test_others_do_not_wait_while_10000_windows_open_by_a_byte() -> None:
    async with (
        serving_picker() as rig,
        connected(rig) as (answers, many),
        connected(rig, address="127.0.0.2") as (_, other),
    ):
        never_overloaded(rig)
        discarding = asyncio.create_task(answers.read())
        first = message(request_headers(0).SerializeToString())
        many.write(hello(window=0))
        other.write(hello())
        for number in range(1, 20_001, 2):
            many.write(headers(number) + data(number, first))
            await many.drain()
        await until(lambda: rig.in_flight() == 10_000)
        server: Any = rig.server.transport
        peer = max(server.peers, key=lambda peer: peer.connection.unsent)
        await until(lambda: not peer.connection.pending and not peer.waiting_bytes)
        unsent = peer.connection.unsent
        many.write(settings([(Setting.INITIAL_WINDOW_SIZE, 1)]))
        other.write(headers(1) + data(1, first))
        await until(lambda: len(rig.server.streams.live) > 10_000)
        assert peer.connection.unsent > unsent - 5_000, "at least half of the windows are not open yet"
        await until(lambda: peer.connection.unsent == unsent - 10_000)
        discarding.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the conditions are in the product
            await asyncio.sleep(0)
