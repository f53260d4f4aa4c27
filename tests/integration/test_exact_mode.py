"""Exact mode live: this repository's model server publishes KV events over ZeroMQ, and the picker follows
them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.picker.picker import Picker
from epp.sources.kvevents.decoding import decode
from epp.sources.kvevents.exact import Exact
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.sequence import Forget, Step
from epp.sources.kvevents.service import ExactService
from epp.sources.kvevents.sockets import EventSource
from model_server.core.hashing import BlockHash
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings
from model_server.server.kv_events import KvEventLog
from model_server.server.kv_publisher import KvEventSettings, open_publisher
from model_server.server.serve import Server, ServerSettings, listening
from tests.harness.client import http_client
from tests.harness.envoy import running_envoy
from tests.harness.gateway import config_in, running_picker
from tests.harness.processes import wait_until
from tests.unit.sources.kvevents.a_language import write_language


class Deaf(Exact):
    """Counts the removals that it receives. Each message removes one block, by its number."""

    def __init__(self) -> None:
        super().__init__({}, max_blocks=1000, max_chunks=1000)
        self.steps: list[object] = []

    def apply(self, server: EndpointName, steps: Sequence[Step], *, complete: bool, now: float) -> None:  # type: ignore[override]  # the service hands over lists
        self.steps += [
            "gap" if isinstance(step, Forget) else decode(step)[0].blocks[0]  # type: ignore[union-attr]  # removals alone are sent
            for step in steps
        ]


@pytest.mark.parametrize("replays", [True, False])
async def test_lost_messages_are_replayed_or_else_the_server_is_forgotten(*, replays: bool) -> None:
    log = KvEventLog(block_size_tokens=16)
    settings = KvEventSettings(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    async with open_publisher(log, settings, wall_clock=lambda: 1.0) as publisher:
        queue, exact = RoutedPrompts(max_prompts=1, max_bytes=1), Deaf()
        picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
        replay = publisher.replay_endpoint or ""
        service = ExactService(
            picker,
            queue,
            lambda: exact,
            topic="",
            source=lambda _: EventSource("", "", publisher.endpoint, replay if replays else ""),
        )
        service.set_endpoints([Endpoint(EndpointName("a"), Address("127.0.0.1", 1))])
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(publisher.serve_replays()), tasks.create_task(service.run())]
            sent = 0

            def send(*, lost: bool = False) -> None:
                nonlocal sent
                log.removed(BlockHash(sent.to_bytes(32, "big")))
                sent += 1
                if lost:
                    log.take(wall_time_s=1.0)  # The event has a number and is kept, but is never published.
                else:
                    publisher.publish()

            async def until_heard() -> None:
                """Send until the subscriber receives a message. A publisher drops messages that it sends
                before it knows of the subscription.
                """

                def newest_heard() -> bool:
                    send()
                    return bool(exact.steps) and exact.steps[-1] != "gap"

                await wait_until(newest_heard, what="a message arrives")

            await until_heard()
            exact.steps.clear()
            send(lost=True)
            send(lost=True)
            send()
            last = sent - 1
            await wait_until(lambda: last in exact.steps, what="the last message arrives")
            heard = exact.steps[: exact.steps.index(last) + 1]
            if replays:
                assert heard[-3:] == [last - 2, last - 1, last]
                assert "gap" not in heard
            else:
                assert heard[-2:] == ["gap", last]
            for task in loops:
                task.cancel()


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
