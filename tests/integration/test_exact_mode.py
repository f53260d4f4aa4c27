"""Exact mode live: two of this repository's model servers publish KV events over ZeroMQ, and the picker's
table follows the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.picker.decision import Question
from epp.picker.picker import Picker
from epp.request.parse import parse_request
from epp.sources.kvevents.decoding import decode
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.mapping import Tokens
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.sequence import Forget, Step
from epp.sources.kvevents.service import ExactService
from epp.sources.kvevents.sockets import EventSource
from model_server.core.cache_options import CacheOptions
from model_server.core.hashing import BlockHash
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings
from model_server.server.kv_events import KvEventLog
from model_server.server.kv_publisher import KvEventSettings, open_publisher
from model_server.server.serve import Server, ServerSettings, listening
from model_server.text.language import ChatMessage
from model_server.text.standin import render_chat
from model_server.text.tokenizer import PIECES, Tokenizer
from tests.harness.client import http_client
from tests.harness.envoy import running_envoy
from tests.harness.following import following_picker
from tests.harness.gateway import config_in, running_picker
from tests.harness.processes import wait_until
from tests.unit.sources.kvevents.a_language import write_language

BLOCK_TOKENS = 16
NUM_BLOCKS = 96
"""1,536 tokens, which are about three prompts of this test."""


class StandInLanguage:
    """The picker's copy of what the model servers use in place of a tokenizer and a template."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer()

    def tokens(self, text: str, *, special: bool) -> Tokens:
        return Tokens(self._tokenizer.encode(text), [piece.end() for piece in PIECES.finditer(text)])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        return render_chat([ChatMessage(m["role"], m["content"]) for m in messages])


def settings_of(algorithm: str) -> ServerSettings:
    return ServerSettings(
        port=0,
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK_TOKENS,
        limits=SchedulerLimits(),
        backend=CostSettings(costs=CostModel(speed=1000)),
        cache=CacheOptions(hash_algorithm=algorithm),  # type: ignore[arg-type]  # of a fixed set in this file
        kv_events=KvEventSettings(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"),
        drain_timeout_s=0.01,
    )


@dataclass(slots=True)
class TwoServers:
    """Two servers, and a picker that follows their events."""

    picker: Picker
    service: ExactService
    servers: Mapping[EndpointName, Server]
    http: Mapping[EndpointName, aiohttp.ClientSession]

    async def chat(self, text: str, *, only: EndpointName | None = None) -> EndpointName:
        """Send one request and end it, as a gateway would."""
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "And now?"}]
        body = json.dumps({"model": "made-up", "messages": messages, "max_tokens": 4}).encode()
        address = {e.name: e.address for e in self.picker.endpoints()}
        request = Question(
            request_id=text[:8],
            inference=parse_request("/v1/chat/completions", body),
            body_bytes=len(body),
            subset=None if only is None else frozenset({address[only]}),
        )
        now = asyncio.get_running_loop().time()
        pick = self.picker.pick(request, now=now)
        name = pick.decision.chosen
        async with self.http[name].post("/v1/chat/completions", data=body) as response:
            assert response.status == 200, await response.text()
        self.picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        self.picker.end(pick, outcome="ended", now=now)
        return name

    def believed(self, text: str) -> dict[EndpointName, int]:
        """Return how many chunks of the prompt each server holds according to the table."""
        body = json.dumps({"model": "made-up", "messages": [{"role": "system", "content": text}]}).encode()
        chain = self.picker.caches.chain(parse_request("/v1/chat/completions", body))
        return self.picker.table.match(chain)

    def model_state(self) -> str:
        status = self.service.status.models.get("")
        return status.state if status is not None else ""

    def held(self, name: EndpointName) -> int:
        """Return the blocks that each server holds according to its events, as the service heard them."""
        status = self.service.status.servers.get(name)
        return status.blocks if status is not None else -1


@contextlib.asynccontextmanager
async def following_two(algorithm: str = "sha256") -> AsyncIterator[TwoServers]:
    async with AsyncExitStack() as stack:
        servers, http, endpoints = {}, {}, []
        for name in (EndpointName("a"), EndpointName("b")):
            settings = settings_of(algorithm)
            server = servers[name] = Server(settings)
            port = await stack.enter_async_context(listening(server, settings))
            http[name] = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            assert server.kv_publisher is not None
            endpoints.append(
                Endpoint(
                    name,
                    Address("127.0.0.1", port),
                    kv_events=server.kv_publisher.endpoint,
                    kv_replay=server.kv_publisher.replay_endpoint or "",
                )
            )
        language = ModelSettings(language=StandInLanguage())
        follower = await stack.enter_async_context(following_picker(endpoints, language))
        running = TwoServers(follower.picker, follower.service, servers, http)
        # Prompts are skipped until an event shows how the servers name blocks.
        first = {"model": "made-up", "messages": [{"role": "system", "content": "first " * 60}]}
        async with http[EndpointName("a")].post("/v1/chat/completions", data=json.dumps(first)) as response:
            assert response.status == 200
        await wait_until(lambda: running.model_state() == "checking", what="the first event is read")
        yield running


def text(name: str) -> str:
    """Return a text of about 500 tokens."""
    rng = random.Random(name)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(400))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
async def test_an_eviction_at_a_server_is_seen_by_the_table(algorithm: str) -> None:
    a, b = EndpointName("a"), EndpointName("b")
    async with following_two(algorithm) as running:
        await running.chat(text("first"), only=a)
        await running.chat(text("first"), only=b)
        await wait_until(
            lambda: running.held(a) > 0 and running.held(b) > 0, what="both servers report blocks"
        )
        await wait_until(lambda: running.model_state() == "on", what="the prompts turn up")
        assert running.believed(text("first")).keys() == {a, b}

        for n in range(4):  # more than a can hold, less than b can hold
            await running.chat(text(f"other {n}"), only=a)
        await wait_until(lambda: a not in running.believed(text("first")), what="the eviction is seen")
        assert running.believed(text("first")).keys() == {b}
        assert running.believed(text("other 3")).keys() == {a}
        status = running.service.status.models[""]
        assert (status.algorithm, status.block_tokens) == (algorithm, BLOCK_TOKENS)
        assert status.prompts["missed"] == 0
        assert status.prompts.keys() == {"mapped", "matched", "missed"}


async def test_blocks_from_before_the_start_count_once_their_prompt_is_routed() -> None:
    """The picker has restarted. The server's events are replayed, and the prompt then tells which chunks the
    blocks stand for.
    """
    a, b = EndpointName("a"), EndpointName("b")
    async with following_two() as running:
        body = {"model": "made-up", "messages": [{"role": "system", "content": text("old")}], "max_tokens": 1}
        async with running.http[a].post("/v1/chat/completions", data=json.dumps(body)) as response:
            assert response.status == 200
        assert running.believed(text("old")) == {}
        await running.chat(text("old"), only=b)
        await wait_until(
            lambda: running.believed(text("old")).keys() == {a, b},
            what="the table has the chunks of both servers",
        )
        chunks = running.believed(text("old"))
        assert chunks[a] >= chunks[b] - 1  # This is the part up to the block in which the two prompts differ.


async def test_a_server_that_resets_its_cache_is_forgotten() -> None:
    a = EndpointName("a")
    async with following_two() as running:
        await running.chat(text("gone"), only=a)
        await wait_until(lambda: running.model_state() == "on", what="the prompt turns up")
        assert running.believed(text("gone"))
        async with running.http[a].post("/reset_prefix_cache") as response:
            assert response.status == 200
        await wait_until(lambda: not running.believed(text("gone")), what="the reset is seen")
        await wait_until(lambda: running.held(a) == 0, what="the server holds no block")


class Deaf(Exact):
    """Counts the removals that it receives. Each message removes one block, by its number."""

    def __init__(self) -> None:
        super().__init__({}, max_blocks=1000, max_chunks=1000)
        self.steps: list[object] = []

    def apply(self, server: EndpointName, steps: Sequence[Step], *, complete: bool, now: float) -> None:  # type: ignore[override]  # the service hands over lists
        self.steps += [
            "gap" if isinstance(step, Forget) else decode(step.payload)[0].blocks[0]  # type: ignore[union-attr]  # removals alone are sent
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
    settings = settings_of("sha256")
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
