"""A server with a KV store below its cache: loaded prefixes give the same answers as computed ones."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from model_server.core.scheduler import SchedulerLimits
from model_server.server.backends import HfSettings
from model_server.server.serve import Server, ServerSettings, listening
from model_server.tiers.serving import ServedTiers
from model_server.tiers.settings import KvStoreSettings
from tests.engine.test_real_server import RealServer, folder

__all__ = ["folder"]  # a fixture

BLOCKS = 24
"""Blocks of 16 tokens. Two of the prompts below do not fit together with their answers."""
FIRST = "An import statement finds a module, and binds its name in the scope. " * 20
SECOND = "Exceptions are a means of breaking out of the normal flow of control. " * 20


class Stored(RealServer):
    @property
    def tiers(self) -> ServedTiers:
        tiers = self.server.backend.tiers
        assert isinstance(tiers, ServedTiers)
        return tiers

    async def ask(self, prompt: str, **body: Any) -> tuple[str, int]:
        """Return the greedy answer, and how many prompt tokens were found in the cache or the store."""
        answer = await self.complete(prompt, **body)
        thread = self.server.backend.step_thread
        assert thread is not None
        await asyncio.wrap_future(thread.submit(int))  # by then the writer has received its work
        assert await asyncio.to_thread(self.tiers.writer.drain, timeout_s=60)
        self.server.engine.check_integrity()
        self.tiers.store.check_integrity()
        self.tiers.reader.check_integrity()
        self.tiers.writer.check_integrity()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def loader_idle(self) -> None:
        """Wait until the loader's thread has done its work and its results have arrived."""
        assert self.server.staging is not None
        await asyncio.wrap_future(self.server.staging.loader.submit(int))
        await asyncio.sleep(0)

    async def metric(self, name: str) -> float:
        async with self.http.get("/metrics") as response:
            page = await response.text()
        [value] = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+]+)$", page, re.MULTILINE)
        return float(value)


Serve = Callable[..., AbstractAsyncContextManager[Stored]]


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def served(*, num_blocks: int = BLOCKS, **store: Any) -> AsyncIterator[Stored]:
        settings = ServerSettings(
            port=0,
            model=str(folder),
            served_names=("tiny",),
            num_blocks=num_blocks,
            limits=SchedulerLimits(max_num_batched_tokens=64),
            backend=HfSettings(device="cpu", threads=1),
            kv_store=KvStoreSettings(**{"folder": tmp_path / "store", "size_bytes": 50_000_000, **store}),
        )
        server = Server(settings)
        async with (
            listening(server, settings) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            yield Stored(http, server)

    return served


async def test_blocks_that_the_cache_lost_are_loaded_and_give_the_same_answer(serve: Serve) -> None:
    async with serve() as server:
        first, cached = await server.ask(FIRST)
        assert cached == 0
        assert (await server.ask(SECOND))[1] == 0, "the second prompt takes the blocks of the first"
        again, cached = await server.ask(FIRST)
        assert again == first
        assert cached > 300
        loaded = await server.metric("vllm:external_prefix_cache_hits_total")
        left = await server.metric("vllm:prefix_cache_hits_total")
        assert loaded >= 16 * 10
        assert left + loaded == cached, "blocks that were still cached are not loaded"
        assert await server.metric("vllm:kv_offload_tiering_write_bytes_total") > 0
        assert await server.ask(FIRST) == (first, cached)
        assert await server.metric("vllm:prefix_cache_hits_total") == left + cached, (
            "the loaded prefix is in the cache again"
        )
        assert await server.metric("vllm:external_prefix_cache_hits_total") == loaded


async def test_prefixes_are_there_after_a_restart(serve: Serve) -> None:
    async with serve() as server:
        first, _ = await server.ask(FIRST)
    async with serve() as server:
        again, cached = await server.ask(FIRST)
        assert again == first
        assert cached > 300


async def test_answers_are_stored_too_and_prompts_share_their_common_beginning(serve: Serve) -> None:
    async with serve() as server:
        tokens = (await server.post("/tokenize", prompt=FIRST))["count"]
        await server.ask(FIRST, max_tokens=34, ignore_eos=True)
        assert server.tiers.writer.counts.stored_blocks == (tokens + 33) // 16
        half = FIRST[: len(FIRST) // 2] + SECOND[: len(SECOND) // 10]
        answer, _ = await server.ask(half)
        assert len(server.tiers.store.segments()) >= 2, "the second prompt is stored from where it differs"
    async with serve() as server:
        again, found = await server.ask(half)
        assert again == answer
        assert found > 100
        assert server.tiers.status().exact_loads == 1


async def test_002_8_a_selective_load_is_kept_apart_and_never_stored(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        exact, _ = await server.ask(FIRST)
    async with serve(ratio=0.25) as server:
        one, cached = await server.ask(FIRST)
        assert cached > 300
        assert await server.metric("vllm:external_prefix_cache_hits_total") == cached
        again, _ = await server.ask(FIRST)
        assert again == one
        longer = FIRST + SECOND[:120]
        more, found = await server.ask(longer, max_tokens=12)
        assert found == cached
        assert await server.ask(longer, max_tokens=12) == (more, found + 16), (
            "blocks that were computed after the loaded prefix are found"
        )
        status = server.tiers.status()
        assert status.selective_loads == 4
        assert status.exact_loads == server.tiers.writer.counts.stored_blocks == 0, (
            "approximate blocks are not stored"
        )
        await server.loader_idle()
        assert await server.ask(FIRST) == (one, cached), "reordered nodes read as before"
        assert await server.metric("kv_store:reordered_nodes_total") >= 1
    async with serve() as server:
        assert (await server.ask(FIRST))[0] == exact
        assert server.tiers.status().exact_loads == 1


async def test_salted_prefixes_are_found_by_their_own_salt_alone(serve: Serve) -> None:
    async with serve() as server:
        await server.ask(FIRST, cache_salt="mine")
        await server.http.post("/reset_prefix_cache")
        for salt, found in (("yours", False), ("", False), ("mine", True)):
            _, cached = await server.ask(FIRST, **({"cache_salt": salt} if salt else {}))
            assert (cached > 0) == found, salt
            await server.http.post("/reset_prefix_cache")


@pytest.mark.parametrize("ratio", [1.0, 0.97])
async def test_many_requests_at_once_get_the_answers_that_each_gets_alone(
    serve: Serve, tmp_path: Path, ratio: float
) -> None:
    """The pool holds a few of the requests. So prefixes come and go, and requests are preempted. With a
    ratio near 1 every layer of this model loads everything, so selective reads are exact too.
    """
    texts = [FIRST[: 250 + 90 * number] + SECOND[: 60 * (number % 3)] for number in range(8)]
    async with serve(folder=tmp_path / "other", num_blocks=128) as server:
        expected = [(await server.ask(text))[0] for text in texts]
    async with serve() as server:
        assert await asyncio.gather(*(server.text(text) for text in texts)) == expected
        await server.ask(SECOND)
    async with serve(ratio=ratio) as server:
        for _ in range(2):
            assert await asyncio.gather(*(server.text(text) for text in reversed(texts))) == expected[::-1]
        await server.ask(SECOND)
        status = server.tiers.status()
        assert status.exact_loads + status.selective_loads >= 4
        assert status.load_failures == 0
