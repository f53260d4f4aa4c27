"""Prefill and decode on different servers, behind a real Envoy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.client import Client, http_client
from tests.harness.gateway import PickerProcess, config_in, running_front, write_endpoints, write_policy
from tests.harness.model_servers import MODEL, ModelServer, running_model_servers

pytestmark = pytest.mark.envoy

LONG = "A sentence that nobody has sent before, about prefill and decode. " * 600
FLAGS = ("--kv-transfer", "--prefill-tokens-per-s", "8000")


@dataclass(slots=True)
class Apart:
    """A server that answers, a server that computes prompts, and Envoy and the picker in front of both."""

    client: Client
    decoder: ModelServer
    prefiller: ModelServer
    picker: PickerProcess

    async def complete(self, prompt: str, *, request_id: str = "r", **headers: str) -> dict[str, Any]:
        sent = {"x-request-id": request_id, **headers}
        reply = await self.client.complete(prompt, headers=sent, model=MODEL, max_tokens=4)
        assert reply.status == 200, reply.body
        document: dict[str, Any] = reply.json()
        return document

    async def computed_tokens(self, server: ModelServer) -> float:
        """Return how many prompt tokens the server computed itself."""
        async with http_client(server.url) as client:
            page = (await client.get("/metrics")).body.decode()
        values = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
        return values["vllm:prompt_tokens_total"] - values["vllm:prompt_tokens_cached_total"]

    @asynccontextmanager
    async def an_answer_under_way(self) -> AsyncIterator[None]:
        """Keep an answer running on the decode server. Without a running answer a prefill delays nobody
        there, and the decode server would compute the prompt itself.
        """
        async with self.client.stream("short", model=MODEL, max_tokens=4000, ignore_eos=True) as answer:
            assert answer.status == 200
            await answer.piece()
            yield


@asynccontextmanager
async def apart(directory: Path) -> AsyncIterator[Apart]:
    config = config_in(directory, policyFile=str(directory / "policy.yaml"))
    spec = {"cost": {"stalledRequestWeight": 5}, "scrape": {"intervalSeconds": 0.1}}
    write_policy(config, spec)
    async with running_model_servers(directory, count=2, flags=FLAGS) as (decoder, prefiller):
        roles = {decoder.name: "decode", prefiller.name: "prefill"}
        write_endpoints(config, (decoder, prefiller), roles=roles)
        front = running_front(config, directory=directory, servers=[decoder.address])
        async with front as (picker, _, client):
            yield Apart(client, decoder, prefiller, picker)


@pytest.mark.core
async def test_prefill_server_computes_the_prompt_and_the_decode_server_does_not(tmp_path: Path) -> None:
    async with apart(tmp_path) as site:
        async with site.an_answer_under_way():
            before = await site.computed_tokens(site.decoder)
            answer = await site.complete(LONG, request_id="long")
            decision = await site.picker.decision("long")
            assert decision is not None
            assert decision["chosen"] == site.decoder.name
            assert decision["prefill"]["name"] == site.prefiller.name
            tokens = answer["usage"]["prompt_tokens"]
            assert tokens > 5000
            assert await site.computed_tokens(site.prefiller) == tokens
            assert await site.computed_tokens(site.decoder) - before <= 16
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens - 16
            await site.complete(LONG, request_id="again")
            again = await site.picker.decision("again")
            assert again is not None
            assert again["prefill"] is None
            assert again["matched_tokens"] > 0.9 * again["prompt_tokens"]
        assert await site.picker.metric("epp_prefill_picks_total", endpoint=site.prefiller.name) == 1
