"""A model server that listens, in the test's process, and a client for it."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from model_server.core.engine import Engine
from model_server.core.request import Adapter
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings
from model_server.server.serve import Server, ServerSettings, listening
from tests.harness.processes import wait_until

FAST = CostModel(speed=1000)
NEVER_ENDING = CostModel(prefill_tokens_per_s=0.001)  # one step takes longer than any test
PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 6


@dataclass(frozen=True, slots=True)
class HttpModelServer:
    """A listening server and a client for it."""

    http: aiohttp.ClientSession
    server: Server

    @property
    def engine(self) -> Engine:
        return self.server.engine

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data) as response:
            text = await response.text()
            kind = response.content_type
            return response.status, json.loads(text) if kind == "application/json" else text

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **body})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def cached(self, **body: Any) -> int:
        usage = (await self.complete(**body))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]

    async def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        async with self.http.get("/metrics") as response:
            page = await response.text()
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    async def ended(self) -> dict[str, float]:
        """Return how many requests ended, by reason."""
        samples = (await self.metrics())["vllm:request_success_total"]
        return {labels["finished_reason"]: count for labels, count in samples}

    async def value(self, name: str) -> float:
        [(_, value)] = (await self.metrics())[name]
        return value


def quick(**changes: Any) -> ServerSettings:
    """Return the settings of a server that computes fast and ends at once."""
    made = {
        "port": 0,
        "limits": SchedulerLimits(),
        "backend": CostSettings(costs=FAST),
        "drain_timeout_s": 0.01,
    }
    return ServerSettings(**{**made, **changes})


Start = Callable[..., Awaitable[HttpModelServer]]


@asynccontextmanager
async def starting() -> AsyncIterator[Start]:
    """Starts any number of servers. All of them end with the block."""
    async with AsyncExitStack() as stack:

        async def started(**changes: Any) -> HttpModelServer:
            backend = CostSettings(
                costs=changes.pop("costs", FAST), mean_answer_tokens=changes.pop("mean_answer_tokens", 128)
            )
            own = {"model": "demo", "adapters": (Adapter("style", "/s"), Adapter("law")), "backend": backend}
            settings = quick(**{"allow_runtime_lora_updating": True, **own, **changes})
            server = Server(settings)
            port = await stack.enter_async_context(listening(server, settings))
            http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            return HttpModelServer(http, server)

        yield started


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a model server."""
    async with starting() as start:
        yield start


async def until(condition: Callable[[], bool]) -> None:
    await wait_until(condition, what="the engine is so far")
