"""Requests that flow control holds, through the real Envoy. They wait longer than Envoy would wait for a
picker, and no request is lost.

The policy says that servers compute one token a second, so one prompt keeps a server busy for a minute. A
metrics page without a running request then says that the server is free.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.backend import Behaviour
from tests.harness.client import Reply
from tests.harness.envoy import EXT_PROC
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

PATIENCE_S = 3.0
"""How long Envoy waits for the picker, unless the picker says that a request is held."""
RUNNING = "vllm:num_requests_running"
FLOW = {"mode": "Hold", "objectives": {"person": 10}}


@asynccontextmanager
async def busy(directory: Path, flow: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[Gateway]:
    """Run a gateway whose one server has work for a minute."""
    policy = {
        "cost": {"prefillTokensPerSecond": 1},
        "scrape": {"intervalSeconds": 0.1, "staleAfterSeconds": 60},
        "flow": {**FLOW, **(flow or {})},
    }
    async with running_gateway(directory, backends=1, policy=policy, **fields) as gateway:
        backend = gateway.backends[0]
        backend.metrics[RUNNING] = 1
        held = backend.behaviour.before_last
        held.shut()
        async with gateway.client.stream("first " * 40) as first:
            await held.wait_waiting(1)
            backend.behaviour = Behaviour()  # the picker answers later requests at once
            yield gateway
            held.open()
            await first.rest()


async def begin(gateway: Gateway, *names: str, **headers: str) -> list[asyncio.Task[Reply]]:
    """Send requests one after the other. Each waits at the picker."""
    tasks = []
    for name in names:
        before = await waiting(gateway)
        tasks.append(asyncio.create_task(gateway.client.complete(f"{name} " * 40, headers=headers)))
        await wait_for(gateway, before + 1)
    return tasks


async def waiting(gateway: Gateway) -> float:
    return await gateway.picker.metric("epp_flow_waiting_requests")


async def wait_for(gateway: Gateway, count: float) -> None:
    """Wait until this many requests wait. The error of a failure says where the other requests are."""

    async def reached() -> bool:
        return await waiting(gateway) == count

    try:
        await wait_until(reached, what=f"{count:g} requests wait")
    except AssertionError as error:
        names = ("epp_flow_waiting_requests", "epp_in_flight", "epp_refused_total", "epp_overload_ratio")
        error.add_note(", ".join([f"{name}: {await gateway.picker.metric(name):g}" for name in names]))
        raise


def free(gateway: Gateway) -> None:
    for backend in gateway.backends:
        backend.metrics[RUNNING] = 0


async def test_request_waits_longer_than_envoys_patience_and_is_served_by_pick(tmp_path: Path) -> None:
    async with busy(tmp_path, envoy={"messageTimeoutSeconds": PATIENCE_S}) as gateway:
        [task] = await begin(gateway, "second", **{"x-request-id": "held"})
        await asyncio.sleep(2 * PATIENCE_S)  # The test is that nothing happens in this time.
        assert not task.done()
        free(gateway)
        reply = await task
        assert reply.status == 200
        decision = await gateway.picker.decision("held")
        assert decision is not None
        assert decision["waited_s"] > PATIENCE_S
        assert await gateway.envoy.bypassed() == 0
        assert await gateway.envoy.stat(f"{EXT_PROC}message_timeouts") == 0
        assert await waiting(gateway) == 0


async def test_a_request_is_refused_before_envoy_stops_waiting_for_it(tmp_path: Path) -> None:
    async with busy(
        tmp_path, envoy={"messageTimeoutSeconds": PATIENCE_S, "maxMessageTimeoutSeconds": 2 * PATIENCE_S}
    ) as gateway:
        reply = await gateway.client.complete("second " * 40)
        assert (reply.status, reply.json()["error"]["code"]) == (429, "flow_ttl")
        assert await gateway.envoy.bypassed() == 0


@pytest.mark.parametrize("drain_s", [30, 0])
async def test_a_picker_that_drains_sends_all_waiting_requests(tmp_path: Path, drain_s: int) -> None:
    """It does so even without time to drain. The request that is being answered may then bypass it."""
    async with busy(tmp_path, drainSeconds=drain_s) as gateway:
        tasks = await begin(gateway, *(f"prompt-{n}" for n in range(5)))
        gateway.picker.process.signal(signal.SIGTERM)
        replies = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [200] * 5
        assert len(gateway.backends[0].prompts) == 6
        assert await gateway.picker.process.wait() == 0
        assert await gateway.envoy.bypassed() <= (drain_s == 0)


@pytest.mark.parametrize("passes", [True, False], ids=["pass", "get 503"])
async def test_all_that_wait_for_a_killed_picker_pass_or_all_get_503(tmp_path: Path, *, passes: bool) -> None:
    async with busy(tmp_path, envoy={"failOpen": passes}) as gateway:
        tasks = await begin(gateway, *(f"prompt-{n}" for n in range(5)))
        bypassed = await gateway.envoy.bypassed()
        gateway.picker.process.kill()
        replies = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [200 if passes else 503] * 5
        # The request that is being answered may add one where they may pass.
        assert (
            await gateway.envoy.bypassed() >= bypassed + 5 if passes else await gateway.envoy.bypassed() == 0
        )
        assert len(gateway.backends[0].prompts) == (6 if passes else 1)
