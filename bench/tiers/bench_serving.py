"""Measures the time to the first token of a prompt that a running server computes, loads from its KV store,
or still has in its blocks.

The bench sends one prompt at a time to SmolLM2 over HTTP, with all cases of a prompt one after the other.
Between cases the prefix cache is reset. Before a load from disk, the bench asks the system to drop the files
from its page cache. `--json` keeps every time.

    python -m tests.engine_env run bench.tiers.bench_serving --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean, median

import aiohttp

from bench.tiers.samples import documents
from model_server.core.scheduler import SchedulerLimits
from model_server.server.backends import HfSettings
from model_server.server.serve import Server, ServerSettings, listening
from model_server.text.pretrained import PretrainedLanguage
from model_server.tiers.serving import ServedTiers
from model_server.tiers.settings import KvStoreSettings
from model_server.weights.known import SMOLLM2, find

COMPUTED = "computed, no store"
STORING = "computed, and stored"
DISK = "loaded from disk"
MEMORY = "loaded from main memory"
SELECTIVE = "half of it read from disk"
BLOCKS = "in the blocks"
CASES = (COMPUTED, STORING, DISK, MEMORY, SELECTIVE, BLOCKS)


class TieredClient:
    def __init__(self, http: aiohttp.ClientSession, server: Server) -> None:
        self._http = http
        self._server = server

    @property
    def tiers(self) -> ServedTiers:
        tiers = self._server.backend.tiers
        assert isinstance(tiers, ServedTiers)
        return tiers

    async def first_token_s(self, prompt: list[int]) -> float:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        began = time.perf_counter()
        async with self._http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.content.readline()
            took = time.perf_counter() - began
            await response.read()
        return took

    async def forget(self, *, also_page_cache: bool) -> None:
        """Write pending blocks to disk and empty the prefix cache. With `also_page_cache`, also drop the
        blocks from the page cache.
        """
        thread = self._server.backend.step_thread
        assert thread is not None
        await asyncio.wrap_future(thread.submit(int))
        assert await asyncio.to_thread(self.tiers.writer.drain, timeout_s=120)
        async with self._http.post("/reset_prefix_cache") as response:
            assert response.status == 200
        for segment in self.tiers.store.segments() if also_page_cache else ():
            with segment.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def serve(stack: AsyncExitStack, store: KvStoreSettings | None = None) -> TieredClient:
    settings = ServerSettings(
        port=0,
        model=SMOLLM2,
        num_blocks=256,
        limits=SchedulerLimits(),
        backend=HfSettings(device="cpu", threads=1),
        kv_store=store,
    )
    server = Server(settings)
    port = await stack.enter_async_context(listening(server, settings))
    timeout = aiohttp.ClientTimeout(total=600)
    session = aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout)
    return TieredClient(await stack.enter_async_context(session), server)


async def measure(prompts: list[list[int]], folder: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {case: [] for case in CASES}
    async with AsyncExitStack() as stack:
        plain = await serve(stack)
        disk = await serve(stack, KvStoreSettings(folder=folder / "disk", cpu_bytes=0))
        memory = await serve(stack, KvStoreSettings(folder=folder / "memory", cpu_bytes=4_000_000_000))
        half = await serve(stack, KvStoreSettings(folder=folder / "half", cpu_bytes=0, ratio=0.5))
        for served in (plain, disk, memory, half):
            await served.first_token_s(prompts[0][:64])
        for prompt in prompts:
            times[COMPUTED].append(await plain.first_token_s(prompt))
            times[STORING].append(await disk.first_token_s(prompt))
            await disk.forget(also_page_cache=True)
            times[DISK].append(await disk.first_token_s(prompt))
            times[BLOCKS].append(await disk.first_token_s(prompt))
            for _ in range(2):
                await memory.first_token_s(prompt)
                await memory.forget(also_page_cache=False)
            times[MEMORY].append(await memory.first_token_s(prompt))
            await half.first_token_s(prompt)
            await half.forget(also_page_cache=True)
            times[SELECTIVE].append(await half.first_token_s(prompt))
    return times


def report(times: dict[str, list[float]], *, prompt_tokens: int) -> None:
    print(
        f"\n| prompt of {prompt_tokens} tokens | first token, s (mean) | median | least | most "
        "| divided by `computed, no store`, by means | by medians |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    computed = times[COMPUTED]
    for case in CASES:
        taken = times[case]
        figures = " | ".join(
            f"{value:.3f}" for value in (fmean(taken), median(taken), min(taken), max(taken))
        )
        by_means, by_medians = fmean(taken) / fmean(computed), median(taken) / median(computed)
        print(f"| {case} | {figures} | {by_means:.2f}x | {by_medians:.2f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[256, 1024], help="lengths of the prompts"
    )
    parser.add_argument(
        "--prompts", type=int, default=5, help="number of prompts of each length (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file for all times")
    args = parser.parse_args()
    language = PretrainedLanguage(find(SMOLLM2, progress=print))
    times_by_length = {}
    for length in args.prompt_tokens:
        prompts = [list(tokens) for tokens in documents(language, length_tokens=length, count=args.prompts)]
        with tempfile.TemporaryDirectory(prefix="kv-store-") as folder:
            times = asyncio.run(measure(prompts, Path(folder)))
        report(times, prompt_tokens=length)
        times_by_length[length] = times
    if args.json is not None:
        args.json.write_text(json.dumps(times_by_length, indent=1) + "\n")


if __name__ == "__main__":
    main()
