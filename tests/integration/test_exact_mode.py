"""Exact mode live: this repository's model server publishes KV events over ZeroMQ, and the picker follows
them.
"""

from __future__ import annotations

import json
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.serve import Server, ServerSettings, listening
from tests.harness.client import http_client
from tests.harness.envoy import running_envoy
from tests.harness.gateway import config_in, running_picker
from tests.harness.processes import wait_until
from tests.unit.sources.kvevents.a_language import write_language


@pytest.mark.core
@pytest.mark.envoy
async def test_the_gateway_with_the_section_follows_its_server(tmp_path: Path) -> None:
    """The gateway runs as an operator would run it: files for configuration, endpoints and tokenizer, and
    Envoy in front.
    """
    folder = write_language(tmp_path / "model")
    settings = ServerSettings(
        port=0,
        num_blocks=96,  # 1,536 tokens, which are fewer than three prompts of this test
        block_size_tokens=16,
        limits=SchedulerLimits(),
        backend=CostSettings(costs=CostModel(speed=1000)),
        kv_events=KvEventSettings(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"),
        drain_timeout_s=0.01,
    )
    server = Server(settings)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(server, settings))
        publisher = server.kv_publisher
        assert publisher is not None
        config = config_in(tmp_path, exactMode={"models": [{"tokenizerFolder": str(folder)}]})
        entry = {"name": "a", "address": f"127.0.0.1:{port}", "kv_events": publisher.endpoint}
        entry["kv_replay"] = publisher.replay_endpoint or ""
        Path(config.endpoints_file).write_text(json.dumps({"endpoints": [entry]}))
        picker = await stack.enter_async_context(running_picker(config, directory=tmp_path))
        envoy = await stack.enter_async_context(running_envoy(config, directory=tmp_path))
        client = await stack.enter_async_context(http_client(envoy.url))

        async def complete(seed: int) -> None:
            tokens = [random.Random(seed).randrange(50_000) for _ in range(600)]
            body = json.dumps({"model": "made-up", "prompt": tokens, "max_tokens": 2}).encode()
            reply = await client.request("POST", "/v1/completions", body=body)
            assert reply.status == 200, reply.body

        async def said(name: str, *, at_least: float = 1.0, **labels: str) -> None:
            async def it_is() -> bool:
                return await picker.metric(name, **labels) >= at_least

            await wait_until(it_is, what=f"{name} {labels}")

        async def learned() -> bool:
            states = [await picker.metric("epp_exact_model", state=state) for state in ("checking", "on")]
            return any(value > 0 for value in states)

        await complete(1)
        await wait_until(learned, what="the first event is read")
        await complete(1)  # the first one may have come before the event
        await said("epp_exact_model", state="on")
        await said("epp_exact_endpoint", state="following")
        for seed in range(2, 6):  # The prompts are more than the cache can hold.
            await complete(seed)
        await said("epp_exact_corrections_total", kind="forgotten")
        assert await picker.metric("epp_exact_prompts_total", result="missed") == 0
