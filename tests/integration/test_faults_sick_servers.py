"""A model server answers 500 at once, or hangs, while its metrics are fine. It must not attract the requests
of the others.
"""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.harness.backend import GENERATED, Behaviour
from tests.harness.client import Reply
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

POLICY = {"scrape": {"intervalSeconds": 0.2, "timeoutSeconds": 1}, "failures": {"trialSeconds": 0.5}}
NUMBERS = count()


async def complete_anew(gateway: Gateway, **fields: Any) -> Reply:
    return await gateway.client.complete(f"prompt {next(NUMBERS)} " + "x" * 400, **fields)


async def left_out(gateway: Gateway, name: str) -> bool:
    return await gateway.picker.metric("epp_endpoint_left_out", endpoint=name) == 1


async def back(gateway: Gateway, name: str) -> None:
    """Wait until a recovered server gets requests again."""

    async def serves() -> bool:
        replies = await asyncio.gather(*(complete_anew(gateway) for _ in range(16)))
        return name in {reply.served_by for reply in replies if reply.status == 200}

    await wait_until(serves, what=f"{name} serves again")


@pytest.mark.parametrize(
    ("fault", "clients"),
    [({"status": 500}, 12), ({"tells": 500}, 1), ({"status": 401}, 1), ({"status": 400}, 1)],
    ids=["500", "told", "401", "400"],
)
async def test_a_server_that_says_no_at_once_gets_trials_only_and_comes_back(
    tmp_path: Path, fault: dict[str, Any], clients: int
) -> None:
    """Each client waits for its answer, so a server that fails at once looks idle to it."""
    async with running_gateway(tmp_path, backends=3, policy=POLICY) as gateway:
        for backend in gateway.backends:
            backend.metrics[GENERATED] = 0.0
            backend.behaviour = Behaviour(headers_pause_s=0.01)

        async def send(count: int) -> None:
            async def client() -> None:
                for _ in range(count):
                    await complete_anew(gateway, stream=True)

            await asyncio.gather(*(client() for _ in range(clients)))

        async def noticed() -> bool:
            await send(1)
            return await left_out(gateway, "s0")

        await send(12 // clients)
        sick, healthy = gateway.backends[0], len(gateway.backends[0].prompts)
        sick.behaviour = Behaviour(**fault)
        await wait_until(noticed, what="s0 is left out")
        bad, bypassed = len(sick.prompts) - healthy, await gateway.envoy.bypassed()
        await send(300 // clients)
        bypassed = (
            await gateway.envoy.bypassed() - bypassed
        )  # Envoy sends these itself, if the picker is late
        after = len(sick.prompts) - healthy - bad - bypassed
        assert after <= 6, f"2 % of 300 are trials; {bad} requests came before"
        sick.behaviour = Behaviour()
        await back(gateway, "s0")


@pytest.mark.core
@pytest.mark.parametrize("fault", [{"status": 429}, {"reset": True}], ids=["429", "reset"])
async def test_one_failure_is_enough_and_a_probe_finds_the_recovery(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    async with running_gateway(
        tmp_path, backends=4, policy={**POLICY, "rule": "round-robin"}, models={"ask": False}
    ) as gateway:
        sick = gateway.backends[0]
        sick.behaviour = Behaviour(**fault)
        for _ in range(4):
            await complete_anew(gateway)
        assert len(sick.prompts) == 1
        await wait_until(lambda: left_out(gateway, "s0"), what="probes find out that it fails")
        for _ in range(40):
            assert (await complete_anew(gateway)).status == 200
        assert len(sick.prompts) == 1, "a trial is owed after 64 requests, or once a probe has succeeded"
        assert await gateway.picker.metric("epp_probes_total", verdict="ill") >= 3
        sick.behaviour = Behaviour()
        await wait_until(lambda: well(gateway), what="a probe succeeds")
        for _ in range(8):
            assert (await complete_anew(gateway)).status == 200
        assert len(sick.prompts) >= 3, "two trials at once, then its share"
        assert not await left_out(gateway, "s0")


async def well(gateway: Gateway) -> bool:
    return await gateway.picker.metric("epp_probes_total", verdict="well") > 0


@pytest.mark.core
async def test_a_server_that_hangs_is_left_out_and_comes_back(tmp_path: Path) -> None:
    policy = {**POLICY, "failures": {"trialSeconds": 0.5, "hangSeconds": 0.3}}
    async with running_gateway(tmp_path, backends=4, policy=policy) as gateway:
        gate = gateway.backends[0].behaviour.before_headers
        gate.shut()
        pending: set[asyncio.Task[Reply]] = set()

        async def noticed() -> bool:
            pending.update(asyncio.create_task(complete_anew(gateway)) for _ in range(4))
            return await left_out(gateway, "s0")

        await wait_until(noticed, what="the server is left out")
        await wait_until(
            lambda: (
                "s0 gets only trial requests: its requests hang" in gateway.picker.process.stderr.read_text()
            ),
            what="the log names it",
        )
        held = gate.waiting
        replies = [asyncio.create_task(complete_anew(gateway)) for _ in range(60)]
        await wait_until(lambda: sum(r.done() for r in replies) >= 55, what="the others serve nearly all")
        assert gate.waiting - held <= 5, "trials only"
        gate.open()
        assert {r.status for r in await asyncio.gather(*pending, *replies)} == {200}

        async def back() -> bool:
            await asyncio.gather(*(complete_anew(gateway) for _ in range(4)))
            return not await left_out(gateway, "s0")

        await wait_until(back, what="the server gets requests again")


async def test_a_server_that_stops_after_headers_is_left_out_and_comes_back(
    tmp_path: Path,
) -> None:
    policy = {**POLICY, "failures": {"trialSeconds": 0.5, "hangSeconds": 0.5}}
    async with running_gateway(tmp_path, backends=4, policy=policy) as gateway:
        for backend in gateway.backends:
            backend.metrics[GENERATED] = 0.0
        sick = gateway.backends[0]
        gate = sick.behaviour.before_body
        gate.shut()
        pending: set[asyncio.Task[Reply]] = set()

        async def noticed() -> bool:
            pending.update(asyncio.create_task(complete_anew(gateway, stream=True)) for _ in range(4))
            return await left_out(gateway, "s0")

        await wait_until(noticed, what="the server is left out")
        seen = len(sick.prompts)
        replies = [await complete_anew(gateway, stream=True) for _ in range(60)]
        assert {reply.status for reply in replies} == {200}
        assert len(sick.prompts) == seen, "while probes hang there are no trials: their headers prove nothing"
        gate.open()
        assert {r.status for r in await asyncio.gather(*pending)} == {200}
        await back(gateway, "s0")
        assert not await left_out(gateway, "s0")
