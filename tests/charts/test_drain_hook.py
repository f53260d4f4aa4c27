"""Envoy's preStop hook against the real Envoy: how it treats requests while a pod terminates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epp.base.types import Address
from tests.harness.client import http_client
from tests.harness.gateway import EnvoyBench, running_bootstrap
from tests.harness.listening import accepting
from tests.harness.ports import free_port
from tests.harness.processes import ManagedProcess, connects, managed_process, wait_until

pytestmark = pytest.mark.envoy

HOOK = Path(__file__).parents[2] / "deploy/helm/prefix-gateway/files/drain.sh"
FOREVER = 100_000


@asynccontextmanager
async def draining(
    bench: EnvoyBench, directory: Path, *, at_least_s: int, at_most_s: int
) -> AsyncIterator[ManagedProcess]:
    """Start the hook as kubelet does."""
    port = Address.parse(bench.config.envoy.admin).port
    command: list[str | Path] = ["bash", HOOK, str(port), str(at_least_s), str(at_most_s)]
    async with managed_process("hook", command, directory=directory) as hook:
        yield hook


async def accepts(bench: EnvoyBench) -> bool:
    address = Address.parse(bench.config.envoy.listen)
    return await connects(address.host, address.port)


async def test_new_requests_are_served_until_everybody_knows_that_pod_terminates(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        running_bootstrap(tmp_path, envoy={"status": status}) as bench,
        http_client(f"http://{status}") as probe,
        draining(bench, tmp_path, at_least_s=FOREVER, at_most_s=FOREVER) as hook,
    ):

        async def not_ready() -> bool:
            return (await probe.get("/ready")).status == 503

        await wait_until(not_ready, what="the readiness probe fails")
        for _ in range(3):
            reply = await bench.client.complete()
            assert reply.status == 200
            assert reply.headers["connection"] == "close", "the client's next request opens a new connection"
        assert hook.status is None


async def test_the_hook_returns_when_the_last_answer_is_over(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path) as bench:
        gates = [backend.behaviour.before_last for backend in bench.backends]
        for backend, gate in zip(bench.backends, gates, strict=True):
            backend.behaviour.chunks = 3
            gate.shut()
        answers = [asyncio.create_task(bench.client.complete(stream=True)) for _ in range(8)]
        await wait_until(lambda: sum(g.waiting for g in gates) == 8, what="eight answers in flight")
        async with draining(bench, tmp_path, at_least_s=0, at_most_s=FOREVER) as hook:

            async def closed() -> bool:
                return not await accepts(bench)

            await wait_until(closed, what="the port closes")
            assert hook.status is None, "it waits for the answers in flight"
            for gate in gates:
                gate.open()
            for reply in await asyncio.gather(*answers):
                assert reply.status == 200
                assert b"[DONE]" in reply.body, "whole, to the end"
            assert await hook.wait() == 0


async def test_the_hook_gives_up_after_its_time(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path, backends=1) as bench:
        gate = bench.backends[0].behaviour.before_last
        gate.shut()
        answer = asyncio.create_task(bench.client.complete())
        await gate.wait_waiting(1)
        async with draining(bench, tmp_path, at_least_s=0, at_most_s=1) as hook:
            assert await hook.wait() == 0
        gate.open()
        assert (await answer).status == 200


async def test_without_an_envoy_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    command: list[str | Path] = ["bash", HOOK, str(free_port()), str(FOREVER), str(FOREVER)]
    async with managed_process("hook", command, directory=tmp_path) as hook:
        assert await hook.wait() == 0


async def test_hook_waits_for_envoy_that_does_not_say_how_many_requests_it_has(tmp_path: Path) -> None:
    """A server in Envoy's place closes connections without an answer for a while, as Envoy does when it is
    too busy to answer.
    """
    asked, page = 0, b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(page)
        writer.close()

    async with accepting(answer) as port:
        command: list[str | Path] = ["bash", HOOK, str(port), "0", str(FOREVER)]
        async with managed_process("hook", command, directory=tmp_path) as hook:
            await wait_until(lambda: asked > 5, what="the hook asks again and again")
            assert hook.status is None
            page = b"HTTP/1.1 200 OK\r\n\r\nhttp.gateway.downstream_rq_active: 0\n"
            assert await hook.wait() == 0
