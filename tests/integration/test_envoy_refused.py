"""Requests that come to nothing cost other clients no hits: on real Envoy, with real caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.client import Client, Reply, http_client
from tests.harness.model_servers import MODEL, ModelServer, running_model_servers
from tests.harness.processes import wait_until
from tests.harness.replicas import Replicas, running_replicas

pytestmark = pytest.mark.envoy

FLAGS = ("--speed", "20", "--num-blocks", "3072", "--max-model-len", "8192")
"""Each cache holds 49,152 tokens, about half of the warm prompts."""
WARM = [random.Random(n).randbytes(3_500).hex() for n in range(24)]
"""Prompts of other clients."""
LEAST_DIFFERENCE = 0.01


@dataclass
class Site:
    servers: list[ModelServer]
    replicas: Replicas
    client: Client

    async def hit_share(self) -> float:
        """Send the warm prompts once more. Return the share of their tokens that servers had cached."""
        usage = [(await self.ask(prompt)).json()["usage"] for prompt in WARM]
        cached = sum((each["prompt_tokens_details"] or {}).get("cached_tokens", 0) for each in usage)
        return float(cached / sum(each["prompt_tokens"] for each in usage))

    async def ask(self, prompt: str) -> Reply:
        return await self.client.complete(prompt, model=MODEL, max_tokens=1)

    async def in_flight(self) -> float:
        return await self.replicas.total("epp_in_flight")

    async def no_suspicion(self) -> None:
        """Wait for the probes that show that the requests were at fault and not the servers."""

        async def cleared() -> bool:
            return await self.replicas.total("epp_endpoint_failure_share") == 0

        await wait_until(cleared, what="no server is suspected", timeout_s=60)

    async def refused(self, *, prompts: int, size: int) -> None:
        for n in range(prompts):
            reply = await self.ask(random.Random(f"refused {n}").randbytes(size // 2).hex())
            assert reply.status == 400

    async def aborted(self, *, prompts: int, size: int) -> None:
        """The servers stand still meanwhile, so that no answer comes first."""
        for server in self.servers:
            server.process.freeze()
        texts = [random.Random(f"aborted {n}").randbytes(size // 2).hex() for n in range(prompts)]
        sent = [asyncio.create_task(self.ask(text)) for text in texts]

        async def all_sent() -> bool:
            return await self.in_flight() == prompts

        async def all_gone() -> bool:
            return await self.in_flight() == 0

        await wait_until(all_sent, what="all requests are picked")
        for task in sent:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await wait_until(all_gone, what="all requests are over")
        for server in self.servers:
            server.process.thaw()


@asynccontextmanager
async def running_site(directory: Path) -> AsyncIterator[Site]:
    async with (
        running_model_servers(directory, count=3, flags=FLAGS) as servers,
        running_replicas(directory, servers=servers) as replicas,
        http_client(replicas.envoy.url) as client,
    ):
        yield Site(servers, replicas, client)


TRIALS: dict[str, Callable[[Site], Awaitable[None]]] = {
    "20 refused prompts of 400 KB": lambda site: site.refused(prompts=20, size=400_000),
    "5 refused prompts of 2 MB": lambda site: site.refused(prompts=5, size=2_000_000),
    "6 aborted prompts of 2 MB": lambda site: site.aborted(prompts=6, size=2_000_000),
    "20 aborted prompts of 24 KB": lambda site: site.aborted(prompts=20, size=24_000),
}


@pytest.mark.timeout(300)
async def test_requests_that_come_to_nothing_cost_others_no_hits(tmp_path: Path) -> None:
    async with running_site(tmp_path) as site:
        await site.hit_share()
        before = await site.hit_share()
        assert before > 0.9
        for name, trial in TRIALS.items():
            await trial(site)
            await site.no_suspicion()
            assert await site.hit_share() >= before - LEAST_DIFFERENCE, name
