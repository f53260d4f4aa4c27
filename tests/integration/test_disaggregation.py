"""Prefill and decode on different servers, behind a real Envoy. The picker names a prefill endpoint, and the
decode server lets that endpoint compute the prompt.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.envoy import running_envoy
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_policy
from tests.harness.listening import accepting
from tests.harness.model_servers import MODEL, ModelServer, running_model_servers

pytestmark = pytest.mark.envoy

LONG = "A sentence that nobody has sent before, about prefill and decode. " * 600
FLAGS = ("--kv-transfer", "--prefill-tokens-per-s", "8000")


@dataclass(slots=True)
class Apart:
    """A server that answers, a server that computes prompts, and Envoy and the picker in front of both."""

    url: str
    decoder: ModelServer
    prefiller: ModelServer
    picker: PickerProcess
    session: aiohttp.ClientSession

    async def complete(self, prompt: str, *, request_id: str = "r", **headers: str) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        sent = {"x-request-id": request_id, **headers}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=sent) as response:
            document: dict[str, Any] = await response.json()
            assert response.status == 200, document
            return document

    async def computed_tokens(self, server: ModelServer) -> float:
        """Return how many prompt tokens the server computed itself."""
        async with self.session.get(f"{server.url}/metrics") as response:
            page = await response.text()
        values = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
        return values["vllm:prompt_tokens_total"] - values["vllm:prompt_tokens_cached_total"]

    @asynccontextmanager
    async def an_answer_under_way(self) -> AsyncIterator[None]:
        """Keep an answer running on the decode server. Without a running answer a prefill delays nobody
        there, and the decode server would compute the prompt itself.
        """
        body = {"model": MODEL, "prompt": "short", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200
            await response.content.readline()
            yield


@asynccontextmanager
async def apart(directory: Path) -> AsyncIterator[Apart]:
    config = config_in(directory, policyFile=str(directory / "policy.yaml"))
    spec = {"cost": {"stalledRequestWeight": 5}, "scrape": {"intervalSeconds": 0.1}}
    write_policy(config, spec)
    async with running_model_servers(directory, count=2, flags=FLAGS) as (decoder, prefiller):
        listed = [
            {"name": "decoder", "address": str(decoder.address), "role": "decode"},
            {"name": "prefiller", "address": str(prefiller.address), "role": "prefill"},
        ]
        Path(config.endpoints_file).write_text(yaml.safe_dump({"endpoints": listed}))
        async with (
            running_picker(config, directory=directory) as picker,
            running_envoy(config, directory=directory) as envoy,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        ):
            await envoy.wait_endpoints({str(decoder.address)})
            yield Apart(envoy.url, decoder, prefiller, picker, session)


@pytest.mark.core
async def test_prefill_server_computes_the_prompt_and_the_decode_server_does_not(tmp_path: Path) -> None:
    async with apart(tmp_path) as site:
        async with site.an_answer_under_way():
            before = await site.computed_tokens(site.decoder)
            answer = await site.complete(LONG, request_id="long")
            decision = await site.picker.decision("long")
            assert decision is not None
            assert decision["chosen"] == "decoder"
            assert decision["prefill"]["name"] == "prefiller"
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
        assert await site.picker.metric("epp_prefill_picks_total", endpoint="prefiller") == 1


async def test_a_header_of_a_client_makes_no_server_call_another_server(tmp_path: Path) -> None:
    async with apart(tmp_path) as site:
        called = asyncio.Event()

        async def listen(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set()
            writer.close()

        async with accepting(listen) as port:
            for name in ("x-prefiller-host-port", "X-LLM-D-Prefiller-Host-Port"):
                await site.complete("short", **{name: f"127.0.0.1:{port}"})
        assert not called.is_set()
