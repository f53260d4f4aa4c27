"""KV events over real ZeroMQ sockets: what a subscriber gets, and what it can ask for again."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio

from model_server.core.hashing import event_hash
from model_server.server.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from model_server.server.kv_publisher import END_OF_REPLAY, KvEventSettings
from model_server.server.serve import Server
from tests.harness.http_model_server import Start

TOPIC = b"kv-events"
EVENTS = KvEventSettings(
    endpoint="tcp://127.0.0.1:0",
    replay_endpoint="tcp://127.0.0.1:0",
    topic=TOPIC.decode(),
    buffer_batches=500,
)


@dataclass(frozen=True, slots=True)
class PublishingServer:
    server: Server
    http: aiohttp.ClientSession
    sub: zmq.asyncio.Socket
    dealer: zmq.asyncio.Socket

    async def post(self, path: str, **body: Any) -> None:
        async with self.http.post(path, data=json.dumps(body)) as response:
            assert response.status == 200, await response.text()

    async def complete(self, prompt: str, *, max_tokens: int = 4) -> None:
        await self.post("/v1/completions", prompt=prompt, max_tokens=max_tokens, ignore_eos=True)

    async def received(self) -> list[bytes]:
        async with asyncio.timeout(30):
            return await self.sub.recv_multipart()

    async def replay(self, sequence: bytes) -> list[list[bytes]]:
        """Return the frames of each message up to the end marker."""
        await self.dealer.send_multipart([b"", sequence])
        messages: list[list[bytes]] = []
        async with asyncio.timeout(30):
            while True:
                empty, *frames = await self.dealer.recv_multipart()
                assert empty == b""
                if frames[1] == END_OF_REPLAY:
                    assert (frames[0], frames[2]) == (b"", b"")
                    return messages
                messages.append(frames)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def running(context: zmq.asyncio.Context, start: Start) -> PublishingServer:
    made = await start(num_blocks=40, kv_events=EVENTS)
    publisher = made.server.kv_publisher
    assert publisher is not None
    assert publisher.replay_endpoint is not None
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    sub.subscribe(TOPIC)
    sub.connect(publisher.endpoint)
    dealer.connect(publisher.replay_endpoint)
    return PublishingServer(made.server, made.http, sub, dealer)


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


async def test_subscriber_that_replays_missed_events_knows_every_block_of_cache(
    running: PublishingServer,
) -> None:
    await asyncio.gather(*(running.complete(f"{n} word " * 120, max_tokens=30) for n in range(4)))
    await running.complete("0 word " * 120)
    copies: Counter[int] = Counter()
    seen: set[str] = set()
    messages = await running.replay(number(0))
    assert [frames[:2] for frames in messages] == [[TOPIC, number(n)] for n in range(len(messages))]
    for _, _, payload in messages:
        for event in decode_batch(payload).events:
            seen.add(type(event).__name__)
            if isinstance(event, BlockStored):
                copies.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                copies.subtract(event.block_hashes)
    pool = running.server.engine.kv_cache.pool
    assert seen == {"BlockStored", "BlockRemoved"}
    assert +copies == Counter(event_hash(b.block_hash) for b in pool.blocks if b.block_hash is not None)


async def test_the_server_says_where_to_subscribe(running: PublishingServer) -> None:
    async with running.http.get("/kv_event_sources") as response:
        sources = await response.json()
    publisher = running.server.kv_publisher
    assert publisher is not None
    assert sources.keys() == {"0"}
    source = sources["0"]
    assert (source["endpoint"], source["replay_endpoint"]) == (publisher.endpoint, publisher.replay_endpoint)
    assert (source["topic"], source["buffer_steps"]) == ("kv-events", 500)


async def test_a_reset_is_published_without_waiting_for_a_request(running: PublishingServer) -> None:
    await running.complete("word " * 60)
    before = len(await running.replay(number(0)))
    await running.post("/reset_prefix_cache")
    [[_, _, payload]] = await running.replay(number(before))
    assert decode_batch(payload).events == (AllBlocksCleared(),)


async def test_a_senseless_request_for_a_replay_is_skipped(running: PublishingServer) -> None:
    await running.complete("word " * 60)
    for frames in ([b"", b"short"], [b"x", number(0)], [b""]):
        await running.dealer.send_multipart(frames)
    assert len(await running.replay(number(0))) >= 1
    assert await running.replay(number(10_000)) == []
