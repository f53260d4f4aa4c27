"""The gateway over real vLLM servers: Envoy and `epp serve` as processes, and the requests and pages that
tests use. `running_vllm_gateway` starts both on free ports before servers that run already. Each request has
its own id, so that a reply comes with the picker's decision about the request. The tests of the whole gateway
on vLLM use this module.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from epp.config.settings import Config
from tests.harness.client import Client, Reply
from tests.harness.envoy import EnvoyProcess
from tests.harness.gateway import PickerProcess, config_in, running_front, write_policy
from tests.harness.processes import wait_until
from tests.vllm_env import tiny_model
from tests.vllm_env.server import MODEL_NAME, VllmServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HITS = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Routed:
    """One answer: the client's part of it, and the picker's decision."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    decision: Mapping[str, Any]

    @property
    def predicted_tokens(self) -> int:
        """Return how many tokens of the prompt the picker expected in the cache of the chosen server."""
        return int(self.decision["matched_tokens"])

    def predicted_anywhere(self) -> int:
        """Return the largest match on any server."""
        return max(int(candidate["matched_tokens"]) for candidate in self.decision["candidates"])


@dataclass(slots=True)
class VllmGateway:
    """vLLM servers, the real picker and Envoy, ready for requests."""

    config: Config
    servers: Sequence[VllmServer]
    picker: PickerProcess
    envoy: EnvoyProcess
    client: Client
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(
        self, path: str, *, request_id: str = "", stream: bool = False, **fields: Any
    ) -> tuple[str, Reply]:
        """POST to `path` through Envoy and read the whole answer. Returns the request's id too."""
        request_id = request_id or f"request-{next(self._ids)}"
        body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 2, **fields}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"content-type": "application/json", "x-request-id": request_id}
        return request_id, await self.client.request(
            "POST", path, body=json.dumps(body).encode(), headers=headers
        )

    async def route(self, path: str, *, stream: bool = False, **fields: Any) -> Routed:
        """Send a request as `ask` does and read the answer. The answer must be whole and a 200, and the
        picker's record of it closed.
        """
        request_id, reply = await self.ask(path, stream=stream, **fields)
        assert reply.status == 200, reply.body
        events = _events(reply.body) if stream else [reply.json()]
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        return Routed(
            text="".join(_text(choice) for event in events for choice in event["choices"]),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            completion_tokens=usage["completion_tokens"],
            decision=await self.closed_decision(request_id),
        )

    async def complete(self, prompt: str, *, stream: bool = False, **fields: Any) -> Routed:
        return await self.route(COMPLETIONS, prompt=prompt, stream=stream, **fields)

    async def closed_decision(self, request_id: str) -> Mapping[str, Any]:
        """Return the decision about a request, once the picker knows how the request ended."""
        found: dict[str, Any] = {}

        async def closed() -> bool:
            nonlocal found
            found = await self.picker.decision(request_id) or {}
            return bool(found.get("outcome"))

        await wait_until(closed, what=f"the picker closes {request_id}")
        return found

    async def endpoint(self, name: str) -> Mapping[str, Any]:
        """Return one endpoint as the picker's admin page shows it."""
        document = await self.picker.page("endpoints")
        found: Mapping[str, Any] = next(e for e in document["endpoints"] if e["name"] == name)
        return found

    async def all_scraped(self) -> bool:
        shown = [await self.endpoint(server.name) for server in self.servers]
        return all(endpoint["scrape_age_s"] is not None for endpoint in shown)

    async def counted(self, counter: str) -> float:
        """Return a counter of vLLM, summed over the servers."""
        each = (asyncio.to_thread(server.counter, counter) for server in self.servers)
        return sum(await asyncio.gather(*each))

    def server(self, name: str) -> VllmServer:
        return next(server for server in self.servers if server.name == name)


@asynccontextmanager
async def running_vllm_gateway(
    directory: Path, servers: Sequence[VllmServer], *, policy: Mapping[str, Any] | None = None
) -> AsyncIterator[VllmGateway]:
    """Run the picker and Envoy before `servers`. `policy` is the part of the spec that differs from the
    defaults.
    """
    config = config_in(directory, policyFile=str(directory / "policy.yaml"))
    write_policy(config, policy or {})
    entries = [
        {
            "name": server.name,
            "address": server.address,
            "model": MODEL_NAME,
            "adapters": list(tiny_model.ADAPTERS) if server.options.model is None else [],
        }
        for server in servers
    ]
    Path(config.endpoints_file).write_text(yaml.safe_dump({"endpoints": entries}))
    addresses = [server.address for server in servers]
    async with running_front(config, directory=directory, servers=addresses) as front:
        gateway = VllmGateway(config, servers, *front)
        await wait_until(gateway.all_scraped, what="the picker has read every server's metrics")
        yield gateway


def _events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, which must have come to its end."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]", f"the answer was cut after {lines[-1]!r}"
    return [json.loads(line) for line in lines[:-1]]


def _text(choice: Mapping[str, Any]) -> str:
    for part in (choice, choice.get("message") or {}, choice.get("delta") or {}):
        text = part.get("text") or part.get("content")
        if text:
            return str(text)
    return ""
