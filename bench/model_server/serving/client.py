"""Sends requests at random times, whether earlier ones are answered or not, and records when each answer
came.

One event of a stream is one token if the server sends each token by itself, as both servers here do. The
command calls this module.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import aiohttp

from bench.model_server.serving.clocks import Clock

_TOKENS = range(1000, 40_000)
_COUNTERS = re.compile(r"^vllm:prefix_cache_(hits|queries)(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    requests: int
    shared_tokens: int
    """The number of tokens that all prompts share."""
    own_tokens: int
    answer_tokens: int
    rate_per_s: float
    seed: int = 1

    def prompts(self, *, name: str) -> list[list[int]]:
        """Return the prompts of this name. The same name always gives the same prompts, and two names share
        no text.
        """
        shared = self._tokens(f"{name} shared", self.shared_tokens)
        return [shared + self._tokens(f"{name} {n}", self.own_tokens) for n in range(self.requests)]

    def first_prompt(self, *, name: str) -> list[int]:
        """Return one more prompt, with the same shared part."""
        return self._tokens(f"{name} shared", self.shared_tokens) + self._tokens(
            f"{name} first", self.own_tokens
        )

    def arrivals_s(self) -> list[float]:
        """Return Poisson arrivals. The times are the same for every side."""
        rng, now = random.Random(self.seed), 0.0
        return [now := now + rng.expovariate(self.rate_per_s) for _ in range(self.requests)]

    def _tokens(self, name: str, count: int) -> list[int]:
        rng = random.Random(f"{self.seed} {name}")
        return [rng.choice(_TOKENS) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times of one request, in seconds since it was sent."""

    token_s: Sequence[float]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


@dataclass(frozen=True, slots=True)
class Run:
    served: Sequence[RequestTimes]
    elapsed_s: float
    prompt_tokens: int
    hit_share: float

    def row(self) -> dict[str, float]:
        """Return means and 99th percentiles, under the names of 001's tables."""
        answered = sum(len(one.token_s) for one in self.served)
        found = {
            "hits": self.hit_share,
            "requests/s": len(self.served) / self.elapsed_s,
            "input tokens/s": self.prompt_tokens / self.elapsed_s,
            "output tokens/s": answered / self.elapsed_s,
        }
        series = {
            "TTFT": [one.ttft_s for one in self.served],
            "TPOT": [one.tpot_s for one in self.served],
            "ITL": [gap for one in self.served for gap in one.gaps_s] or [0.0],
        }
        for name, seconds in series.items():
            found[f"{name} ms"] = 1000 * fmean(seconds)
            found[f"{name} P99"] = 1000 * percentile(seconds, 99)
        return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that this percentage of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def serve(url: str, model: str, load: Load, *, name: str, clock: Clock) -> Run:
    """Send the load after one prompt that does not count, and wait for every answer. Raise RuntimeError if
    the server refused a request or cut it off.
    """
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        asking = partial(_ask, session, model, clock=clock)
        await asking(load.first_prompt(name=name), answer_tokens=2)
        before = await _counters(session)
        started_s = clock.now_s()
        prompts = load.prompts(name=name)
        tasks: list[asyncio.Task[RequestTimes]] = []
        for prompt, at_s in zip(prompts, load.arrivals_s(), strict=True):
            await clock.until(started_s + at_s, busy=lambda: not all(task.done() for task in tasks))
            tasks.append(asyncio.create_task(asking(prompt, answer_tokens=load.answer_tokens)))
        served = await asyncio.gather(*tasks)
        elapsed_s = clock.now_s() - started_s
        after = await _counters(session)
    queried = after["queries"] - before["queries"]
    hits = after["hits"] - before["hits"]
    return Run(served, elapsed_s, sum(map(len, prompts)), hits / queried if queried else 0.0)


async def _ask(
    session: aiohttp.ClientSession, model: str, prompt: list[int], *, answer_tokens: int, clock: Clock
) -> RequestTimes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    sent_s, times, ended = clock.now_s(), list[float](), False
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.url}: {response.status} {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("choices"):
                    times.append(clock.now_s() - sent_s)
    if not ended or not times:
        raise RuntimeError("a stream broke off")
    return RequestTimes(times)


async def _counters(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as response:
        page = await response.text()
    found = {"hits": 0.0, "queries": 0.0}
    for name, value in _COUNTERS.findall(page):
        found[name] += float(value)
    return found
