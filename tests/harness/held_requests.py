"""A real gateway whose one server is busy, so that flow control holds every request.

The policy says that servers compute one token a second, so one prompt keeps a server busy for a minute. A
metrics page without a running request then says that the server is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.harness.backend import Behaviour
from tests.harness.client import Reply
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

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
