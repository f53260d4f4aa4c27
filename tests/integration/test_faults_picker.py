"""The picker dies, hangs, drains or holds thousands of streams: what clients of the gateway notice."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import OpenReply, Reply
from tests.harness.envoy import PICKER, cluster
from tests.harness.gateway import Gateway, answers_in_flight, running_gateway
from tests.harness.http2 import http2_client
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

STREAMS = 8


async def let_go(gateway: Gateway, answers: list[OpenReply]) -> None:
    """Let every answer finish, and check that it is whole."""
    for backend in gateway.backends:
        backend.behaviour.before_last.open()
    bodies = await asyncio.gather(*(a.rest() for a in answers))
    assert [b.count(b"data: ") for b in bodies] == [4] * STREAMS
    assert all(b.endswith(b"[DONE]\n\n") for b in bodies)


async def new_requests(gateway: Gateway, count: int = STREAMS) -> list[Reply]:
    """Start requests. They are held like the others when they reach a backend."""
    before = gateway.held
    tasks = [asyncio.create_task(gateway.client.complete(f"new {n}")) for n in range(count)]
    await wait_until(lambda: gateway.held == before + count, what="the new requests are in flight")
    for backend in gateway.backends:
        backend.behaviour.before_last.open()
    return await asyncio.gather(*tasks)


@pytest.mark.core
@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_running_answers_complete_and_new_requests_are_served(tmp_path: Path, fault: str) -> None:
    async with running_gateway(tmp_path) as gateway, answers_in_flight(gateway, STREAMS) as answers:
        if fault == "killed":
            gateway.picker.process.kill()
            await gateway.picker.process.wait()
        else:
            gateway.picker.process.freeze()
        replies = await new_requests(gateway)
        assert [r.status for r in replies] == [200] * STREAMS
        await let_go(gateway, answers)
        assert await gateway.envoy.bypassed() >= STREAMS


@pytest.mark.core
async def test_a_picker_that_stops_on_sigterm_cuts_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway, answers_in_flight(gateway, STREAMS) as answers:
        assert await gateway.picker.process.terminate() == 0
        assert gateway.held == STREAMS
        await let_go(gateway, answers)


@pytest.mark.core
async def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, workers=2) as gateway:
        victim, other = gateway.picker.worker_pids()
        os.kill(victim, signal.SIGKILL)

        def another() -> bool:
            pids = gateway.picker.worker_pids()
            return len(pids) == 2 and victim not in pids and other in pids

        await wait_until(another, what="there are two workers again")
        await gateway.picker.process.wait_ready(gateway.picker.ready)
        await gateway.envoy.wait_stat_is(f"{PICKER}membership_healthy", 2)
        before = await gateway.envoy.bypassed()
        replies = await asyncio.gather(*(gateway.client.complete(f"{n}") for n in range(24)))
        assert [r.status for r in replies] == [200] * 24
        assert await gateway.envoy.bypassed() == before


async def test_two_thousand_streams_held_at_once_all_pass_the_picker(tmp_path: Path) -> None:
    # This test is about the number of streams and not about the rate. They come in waves, and a slow machine
    # may take its time over each wave.
    async with running_gateway(tmp_path, envoy={"messageTimeoutSeconds": 30}) as gateway:
        for backend in gateway.backends:
            backend.behaviour.before_last.shut()
        pending: list[asyncio.Task[Reply]] = []
        for count in range(200, 2001, 200):
            pending += [asyncio.create_task(gateway.client.complete(f"{count + n}")) for n in range(200)]
            await wait_until(lambda count=count: gateway.held == count, what=f"{count} are held")  # type: ignore[misc]  # mypy cannot type a default of a lambda
        # A busy picker routes a part of each wave by load and ends these streams. They were picked, and the
        # picker holds nothing for them.
        let_go = await gateway.picker.metric("epp_unread_bodies_total", reason="overload")
        assert await gateway.picker.metric("epp_in_flight") + let_go == 2000
        for backend in gateway.backends:
            backend.behaviour.before_last.open()
        assert {r.status for r in await asyncio.gather(*pending)} == {200}
        assert await gateway.envoy.bypassed() == 0


async def test_pings_of_the_data_plane_and_of_clients_lose_no_stream(tmp_path: Path) -> None:
    """A gRPC server drops the connection of a client that pings often, unless its settings allow that."""

    def ping_often(document: dict[str, Any]) -> None:
        # Twenty pings within a second show the fault that one ping a second shows after five seconds.
        options = cluster(document, "picker")["typed_extension_protocol_options"]
        http2 = options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["explicit_http_config"]
        http2["http2_protocol_options"] = {"connection_keepalive": {"interval": "0.1s", "timeout": "5s"}}

    async with running_gateway(tmp_path, edit=ping_often) as gateway:
        for backend in gateway.backends:
            backend.behaviour.before_last.shut()
        async with http2_client(gateway.config.envoy.listen) as client:
            streams = [client.complete(f"{n}", stream=True) for n in range(STREAMS)]
            await wait_until(lambda: gateway.held == STREAMS, what="all answers are in flight")
            pinging = asyncio.create_task(client.ping_every(0.1))
            await wait_until(lambda: client.pongs >= 20, what="twenty pings are answered")
            assert await gateway.picker.metric("epp_in_flight") == STREAMS
            for backend in gateway.backends:
                backend.behaviour.before_last.open()
            await asyncio.wait_for(asyncio.gather(*(s.over.wait() for s in streams)), 60)
            pinging.cancel()
            assert [(s.status, s.error) for s in streams] == [(200, "")] * STREAMS
            assert all(bytes(s.body).endswith(b"[DONE]\n\n") for s in streams)
        assert await gateway.envoy.bypassed() == 0
        assert await gateway.envoy.stat(f"{PICKER}upstream_cx_destroy_remote") == 0
