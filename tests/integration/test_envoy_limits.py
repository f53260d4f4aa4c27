"""Clients that never finish a request hold little of the real Envoy, and not for long, on our bootstrap."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import h2.config
import h2.connection
import pytest

from epp.base.types import Address
from tests.harness.client import http_client
from tests.harness.gateway import running_bootstrap
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.raw_http import connection, send_raw

pytestmark = pytest.mark.envoy

POST = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n"
MIB = 2**20


async def test_half_a_head_and_half_a_body_get_408_and_an_answer_may_take_longer(tmp_path: Path) -> None:
    limits = {"headerTimeoutSeconds": 1, "requestTimeoutSeconds": 2}
    async with running_bootstrap(tmp_path, envoy=limits) as bench:
        gateway = Address.parse(bench.config.envoy.listen)
        for backend in bench.backends:
            backend.behaviour.before_headers.shut()
        slow = asyncio.create_task(bench.client.complete())
        for unfinished in (POST, POST + b"content-length: 1000\r\n\r\nabc"):
            reply = await send_raw(gateway, unfinished)
            assert (reply.status, reply.error()["code"]) == (408, "request_timeout")
        assert not slow.done(), "this request was sent first, and both limits have passed since then"
        for backend in bench.backends:
            backend.behaviour.before_headers.open()
        assert (await slow).status == 200


async def test_connections_over_the_limit_are_closed_and_status_page_has_its_own(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"maxConnections": 5, "status": status}) as bench,
        http_client(f"http://{status}") as watcher,
        AsyncExitStack() as stack,
    ):
        gateway = Address.parse(bench.config.envoy.listen)
        opened = [
            await stack.enter_async_context(connection(gateway)) for _ in range(6)
        ]  # one connection more than the limit
        for _, writer in opened:
            writer.write(POST)
        await asyncio.wait(
            [asyncio.create_task(reader.read()) for reader, _ in opened], return_when=asyncio.FIRST_COMPLETED
        )
        assert sum(reader.at_eof() or reader.exception() is not None for reader, _ in opened) == 1
        assert (await watcher.get("/ready")).status == 200
        assert (
            await bench.envoy.stat("listener.127.0.0.1_" + str(gateway.port) + ".downstream_cx_active") == 5
        )


async def unfinished_bodies(gateway: Address, stack: AsyncExitStack, *, count: int) -> None:
    """All requests begin, over HTTP/1.1. Then each sends 8 of its 9 MiB."""
    opened = [await stack.enter_async_context(connection(gateway)) for _ in range(count)]
    for reader, writer in opened:
        writer.write(POST + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % (9 * MIB))
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
    for _, writer in opened:
        writer.write(b"x" * 8 * MIB)


async def unfinished_streams(
    gateway: Address, stack: AsyncExitStack, *, count: int
) -> h2.connection.H2Connection:
    """Over HTTP/2, each stream sends as much of its 8 MiB as the first windows allow."""
    reader, writer = await stack.enter_async_context(connection(gateway))
    client = h2.connection.H2Connection(h2.config.H2Configuration())
    client.initiate_connection()
    writer.write(client.data_to_send())
    client.receive_data(await reader.read(65536))
    head = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "gateway")]
    for number in range(1, 2 * count, 2):
        client.send_headers(number, head)
        while window := min(client.local_flow_control_window(number), 16_384):
            client.send_data(number, b"x" * window)
            writer.write(client.data_to_send())
    return client


CUT = "http.gateway.downstream_rq_overload_close"
REFUSING = "overload.envoy.overload_actions.stop_accepting_requests.active"
RESET = "envoy.overload_actions.reset_high_memory_stream.count"


async def test_unfinished_bodies_are_cut_off_at_the_limit_and_the_others_live_on(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path, envoy={"maxHeapBytes": 96 * MIB}) as bench:
        gateway = Address.parse(bench.config.envoy.listen)
        for backend in bench.backends:
            backend.behaviour.before_headers.shut()
        begun = asyncio.create_task(bench.client.complete())
        await wait_until(
            lambda: sum(len(b.prompts) for b in bench.backends) == 1, what="one request has reached a server"
        )
        async with AsyncExitStack() as stack:
            await unfinished_bodies(gateway, stack, count=40)
            await bench.envoy.wait_stat(CUT, at_least=1)
            await bench.envoy.wait_stat_is(REFUSING, 0)
            for backend in bench.backends:
                backend.behaviour.before_headers.open()
            assert (await begun).status == 200, "an answer that had begun runs on"
            assert (await bench.client.complete()).status == 200


async def test_over_http2_largest_streams_are_ended_and_small_requests_live_on(tmp_path: Path) -> None:
    async with (
        running_bootstrap(tmp_path, envoy={"maxHeapBytes": 96 * MIB}) as bench,
        AsyncExitStack() as stack,
    ):
        gateway = Address.parse(bench.config.envoy.listen)
        for _ in range(20):
            await unfinished_streams(gateway, stack, count=4)
            if await bench.envoy.stat(RESET):
                break
        await bench.envoy.wait_stat(RESET, at_least=1)
        await bench.envoy.wait_stat_is(REFUSING, 0)
        assert (await bench.client.complete()).status == 200
