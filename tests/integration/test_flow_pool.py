"""Two or four pickers with flow control share their state. They are processes with a real Redis, or workers
with a local socket. Bounds and shares hold for all pickers together. The policy says that the one server
computes one token a second, so one request keeps the server busy until the test ends that request.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from epp.tools.conformance.dataplane import DUPLEX, Exchange, exchange
from tests.harness.backend import Backend, running_backend
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_endpoints, write_policy
from tests.harness.processes import wait_until
from tests.harness.redis_server import running_redis

TENANT: Final = "x-llm-d-inference-fairness-id"
REPORTED_S: Final = 0.2
"""Longer than a report takes to the other pickers. Bounds and shares hold for all pickers together if
requests come and go more slowly than reports.
"""
_POLICY: Final[dict[str, Any]] = {
    "cost": {"prefillTokensPerSecond": 1},
    "scrape": {"intervalSeconds": 0.1, "staleAfterSeconds": 60},
}


class AskedRequest:
    """A request at one of the pickers, and its result."""

    def __init__(self, running: Exchange, tenant: str) -> None:
        self.running = running
        self.tenant = tenant

    async def send(self, number: int) -> AskedRequest:
        body = json.dumps({"model": "m", "prompt": f"{number:03} " * 80}).encode()
        headers = [("x-request-id", f"r{number}"), (TENANT, self.tenant)]
        await self.running.send(body, headers=headers)
        return self

    async def end(self) -> None:
        """The server has answered this request."""
        await self.running.respond(b"{}")
        await self.running.finish()


class TwoPickers:
    """Two pickers before one server. Made by `running_pool`."""

    def __init__(
        self, pickers: Sequence[PickerProcess], channels: Sequence[grpc.aio.Channel], stack: AsyncExitStack
    ) -> None:
        self.pickers = pickers
        self._channels = channels
        self._stack = stack
        self._numbers = 0

    async def waiting(self) -> float:
        return sum([await picker.metric("epp_flow_waiting_requests") for picker in self.pickers])

    async def begin(self, picker: int, tenant: str) -> asyncio.Task[AskedRequest]:
        one = await self._stack.enter_async_context(
            exchange(self._channels[picker], mode=DUPLEX, patience_s=120.0)
        )
        self._numbers += 1
        return asyncio.create_task(AskedRequest(one, tenant).send(self._numbers))

    async def ask(self, picker: int, tenant: str = "t") -> asyncio.Task[AskedRequest]:
        """Return when the request waits or was answered."""
        before = await self.waiting()
        task = await self.begin(picker, tenant)

        async def decided() -> bool:
            return task.done() or await self.waiting() > before

        await wait_until(decided, what="the request waits or is answered")
        return task


async def decided_of(tasks: list[asyncio.Task[AskedRequest]]) -> list[AskedRequest]:
    """Wait until at least one request was answered. Take the answered requests out of the list."""
    done, _ = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert done, "no request goes, though the server is free"
    for task in done:
        tasks.remove(task)
    return [task.result() for task in done]


@asynccontextmanager
async def running_pool(
    folder: Path, *, workers: bool = False, count: int = 2, **flow: Any
) -> AsyncIterator[TwoPickers]:
    """Run pickers that know of each other, before one server whose metrics page says that it is busy."""
    async with AsyncExitStack() as stack:
        server: Backend = await stack.enter_async_context(running_backend("s"))
        server.metrics["vllm:num_requests_running"] = 1
        flow = {"mode": "Hold", "ttlSeconds": 600, **flow}
        pickers, sockets = [], []
        if workers:
            pickers.append(await _picker(folder / "both", server, flow, stack, workers=count))
            sockets = [folder / "both" / f"picker.sock.{n}" for n in range(count)]
        else:
            redis = await stack.enter_async_context(running_redis(folder))
            for name in map(str, range(count)):
                sharing = {"redis": {"url": redis.url}}
                pickers.append(await _picker(folder / name, server, flow, stack, sharing=sharing))
                sockets.append(folder / name / "picker.sock")
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{path}")) for path in sockets
        ]

        async def met() -> bool:
            peers = sum([await p.metric("epp_sharing_peers") for p in pickers])
            scraped = sum([await p.metric("epp_endpoint_scrape_ok") for p in pickers])
            return (peers, scraped) == (count * (count - 1), count)

        await wait_until(met, what="the pickers have met and know the server", timeout_s=60)
        yield TwoPickers(pickers, channels, stack)


async def _picker(
    own: Path, server: Backend, flow: dict[str, Any], stack: AsyncExitStack, **fields: Any
) -> PickerProcess:
    own.mkdir()
    config = config_in(own, policyFile=str(own / "policy.yaml"), **fields)
    write_endpoints(config, [server])
    write_policy(config, {**_POLICY, "flow": flow})
    return await stack.enter_async_context(running_picker(config, directory=own, name=own.name))


@pytest.mark.parametrize("workers", [False, True], ids=["redis", "workers"])
async def test_four_pickers_keep_bound_and_shares_within_a_tenth(tmp_path: Path, *, workers: bool) -> None:
    """One tenant asks three times as often as the other. Each gets half of what is served, to one request or
    two.
    """
    count, bound, asked, served = 4, 20, 28, 10
    async with running_pool(tmp_path, workers=workers, count=count, inAll={"maxRequests": bound}) as pool:
        went = await (await pool.ask(0))
        tasks = []
        for n in range(asked):
            tasks.append(await pool.begin(n % count, "modest" if n // count % 4 == 0 else "greedy"))
            await asyncio.sleep(REPORTED_S)

        async def bounded() -> bool:
            waiting = await pool.waiting()
            refused = sum(task.done() for task in tasks)
            return abs(waiting - bound) <= 0.1 * bound and waiting + refused == asked

        await wait_until(bounded, what="requests over the bound are refused")
        refused = [task for task in tasks if task.done()]
        assert abs(len(refused) - (asked - bound)) <= 0.1 * bound
        tasks = [task for task in tasks if not task.done()]
        running, got = [went], Counter[str]()
        while got.total() < served:
            await asyncio.sleep(REPORTED_S)
            for one in running:
                await one.end()
            running = await decided_of(tasks)  # two, if two pickers send before they hear of each other
            got.update(one.tenant for one in running)
        print(
            f"of {asked} requests {len(refused)} were refused; the first {got.total()} that went: {dict(got)}"
        )
        assert abs(got["modest"] - got.total() / 2) <= 0.15 * served
