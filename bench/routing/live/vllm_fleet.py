"""Runs real vLLM servers for the live comparison, measures how fast they are, and makes the conversations
that they get.

One description gives the flags of the servers and the simulated engines. The speed of a server is measured
before the runs (`probe`), since it depends on the machine and on its other work. `vllm` and the bench of GPUs
call this module.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import aiohttp
import msgspec

from bench.load.sse import Answer, read_answer
from bench.routing.live.generator import completion
from bench.routing.live.words import prompt_of
from bench.routing.workloads import (
    SYSTEM_IDS,
    ClosedLoop,
    OpenLoop,
    Turn,
    length,
    one_client,
    shared_system_prompts,
)
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.sim.engine import EngineShape
from model_server.sim.prompts import Segment
from tests.harness.processes import wait_until
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME, ServerOptions, VllmServer

_PROBE_ANSWER: Final = 9
_START_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Servers, and the conversations that they get. The defaults are for SmolLM2 on two cores."""

    servers: int = 4
    cache_blocks: int = 160
    """The size of a cache, 5,120 tokens. Four caches together hold all conversations of the users, and one
    cache holds about half of them.
    """
    limits: SchedulerLimits = field(
        default_factory=lambda: SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=512)
    )
    longest_tokens: int = 2048
    users: int = 10
    scale: float = 1.0
    """The factor for the lengths of prompts and answers."""
    hurry: float = 1.0
    """Users think for a time that is divided by this number."""
    groups_per_s: float = 0.0
    """If not 0, so many requests a second of 19 groups with a shared prompt come instead of conversations."""
    serial: bool = False
    """One client sends the same prompts again and again instead, one request at a time. They fit two caches,
    but not one.
    """
    probe_tokens: int = 400
    in_turn: bool = False
    """True if a server starts only when the one before is ready. Servers that start on one GPU at the same
    time count each other's memory.
    """
    arguments: tuple[str, ...] = ()
    """Further flags of a server."""
    variables: tuple[tuple[str, str], ...] = ()
    """Further environment variables of a server."""

    @property
    def cache_tokens(self) -> int:
        return self.cache_blocks * BLOCK_TOKENS

    def workload(self, *, seed: int, seconds: float) -> ClosedLoop | OpenLoop:
        """Return the workload. The same arguments always give the same workload."""
        if rate := self.groups_per_s:
            rng, count = random.Random(f"groups {seed}"), round(rate * seconds)
            return OpenLoop(shared_system_prompts(rng, count, groups=19, scale=self.scale), rate_per_s=rate)
        users, rng = 1 if self.serial else self.users, random.Random(f"talks {seed}")
        talking = one_client(rng, prompts=9, tokens=700) if self.serial else talks(rng, scale=self.scale)
        return ClosedLoop(talking, users=users, until_s=seconds, ramp_s=seconds / 6, speed=self.hurry)

    def shape(self, speed: Speed) -> EngineShape:
        """Return servers for the simulator, with the speed that the real servers have together."""
        costs = CostModel(
            prefill_tokens_per_s=speed.together_tokens_per_s,
            decode_step_s=speed.step_s,
            decode_per_request_s=0.1 * speed.step_s,
        )
        return EngineShape(
            num_blocks=self.cache_blocks, block_tokens=BLOCK_TOKENS, limits=self.limits, costs=costs
        )

    def options(self, model: Path) -> ServerOptions:
        limits = (
            *("--max-num-seqs", str(self.limits.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.limits.max_num_batched_tokens)),
        )
        return ServerOptions(
            model=model,
            cache_blocks=self.cache_blocks,
            prompt_limit_tokens=self.longest_tokens,
            arguments=(*limits, *self.arguments),
            # Only in development mode can vLLM's caches be emptied between runs.
            variables={"VLLM_SERVER_DEV_MODE": "1", **dict(self.variables)},
        )


@asynccontextmanager
async def running_vllm_fleet(
    setting: Setting, found: VllmEnvironment, *, model: Path, folder: Path
) -> AsyncIterator[list[VllmServer]]:
    """Run servers named `vllm-0` and so on, with their logs in `folder`. `model` is a folder. Raise
    VllmServerError if a server does not start.
    """
    servers = [
        VllmServer(found, name=f"vllm-{n}", folder=folder, options=setting.options(model))
        for n in range(setting.servers)
    ]
    try:
        for server in servers:
            server.start()
            if setting.in_turn:
                await wait_until(server.poll_ready, what=f"{server.name} is ready", timeout_s=_START_S)
        for server in servers:
            await wait_until(server.poll_ready, what=f"{server.name} is ready", timeout_s=_START_S)
        yield servers
    finally:
        for server in servers:
            server.kill()


def talks(rng: random.Random, *, scale: float) -> Iterator[Sequence[Turn]]:
    """Yield the conversations of people who chat. A conversation has one of four system prompts of 192
    tokens, 3 to 7 turns, short answers, and 6 s of thinking.
    """

    def tokens(mean: float, *, least: float, most: float) -> int:
        return length(rng, mean=scale * mean, sigma=0.5, least=round(scale * least), most=round(scale * most))

    while True:
        yield [
            Turn(
                added_tokens=tokens(200 if rng.random() < 0.2 else 50, least=12, most=400),
                answer_tokens=tokens(10, least=4, most=24),
                think_s=rng.expovariate(1 / 6),
                system=None if index else Segment(SYSTEM_IDS + rng.randrange(4), round(scale * 192)),
            )
            for index in range(rng.randint(3, 7))
        ]


class Speed(msgspec.Struct, frozen=True):
    """The speed of the servers, as a client sees it."""

    alone_tokens_per_s: float
    """The prefill rate for a new prompt while the other servers do nothing. This is the mean of the
    servers.
    """
    together_tokens_per_s: float
    """The prefill rate of each server while all servers compute, since they may share the machine's cores."""
    step_s: float
    """The time between two tokens of one request, while every server answers one request."""


async def probe(setting: Setting, session: aiohttp.ClientSession, servers: Sequence[VllmServer]) -> Speed:
    """Measure the speed. Prompts are new, and the caches are emptied before each run."""
    names = iter(range(1 << 30, 1 << 31))

    async def ask(server: VllmServer) -> tuple[float, Answer]:
        """Return the prompt tokens that the server computed in a second, and the answer."""
        prompt = prompt_of([Segment(next(names), setting.probe_tokens)], answers={})
        body = completion(MODEL_NAME, prompt, answer_tokens=_PROBE_ANSWER)
        sent, pieces = time.monotonic(), []
        async with session.post(f"http://{server.address}/v1/completions", json=body) as response:
            while piece := await response.content.readany():
                pieces.append((time.monotonic(), piece))
        answer = read_answer(pieces)
        return answer.prompt_tokens / (answer.first_token_at - sent), answer

    await asyncio.gather(*map(ask, servers))  # the first prompt of a process takes longer
    alone = [await ask(server) for server in servers]
    together = await asyncio.gather(*map(ask, servers))
    return Speed(
        alone_tokens_per_s=fmean(rate for rate, _ in alone),
        together_tokens_per_s=fmean(rate for rate, _ in together),
        step_s=fmean(answer.inter_token_s or 0.0 for _, answer in together),
    )


async def forget(session: aiohttp.ClientSession, servers: Sequence[VllmServer]) -> None:
    """Empty the caches as soon as no request is left. Raise AssertionError if a server stays busy."""

    async def emptied(server: VllmServer) -> bool:
        async with session.post(f"http://{server.address}/reset_prefix_cache") as response:
            response.raise_for_status()
            return bool((await response.json())["success"])

    for server in servers:
        await wait_until(partial(emptied, server), what=f"{server.name} is idle", timeout_s=120)
