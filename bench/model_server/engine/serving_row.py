"""Measures row 001-7 on the engine itself, without HTTP: requests come at random times by the clock, with the
cache and without. The command calls this module.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench, Kept, Say
from bench.tables import percentile
from model_server.core.cache_options import CacheOptions
from model_server.core.request import Request, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    requests: int
    shared_tokens: int
    own_tokens: int
    answer_tokens: int
    rate_per_s: float


WHOLE = Arrivals(requests=500, shared_tokens=330, own_tokens=550, answer_tokens=150, rate_per_s=16.0)
"""The document's load at twice its rate, more than our engine takes on an H200 without the cache. Of 330
shared tokens, 20 blocks of 16 can be found: 36.4 % of a prompt. The document's 37.5 % are all 330, which
partial blocks find.
"""
SMALL = replace(WHOLE, requests=24, rate_per_s=2.5)
"""The same at a rate that, divided by the number of layers, SmolLM2 nearly reaches on one CPU thread."""


def serving(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> dict[str, Any]:
    """Measure row 001-7: how a shared start changes times and throughput when requests come at random
    times. The engine that has fewer seconds behind it makes the next step, so a machine that slows down does
    it to both.
    """
    load = WHOLE if bench.whole else replace(SMALL, rate_per_s=2.5 / bench.model.memory.shape.num_layers)
    load = replace(load, requests=bench.requests or load.requests)
    first = len(kept.series.get("001-7 on: hits", ()))
    for repeat in range(first, first + repeats):
        on = Side(bench, load, cache=CacheOptions(partial_blocks=True), seed=repeat)
        off = Side(bench.twin(), load, cache=None, seed=repeat)
        printed_at = 0
        for ended in in_turns(on, off):
            if ended >= printed_at + 50:
                printed_at = ended
                say(f"{ended} of {2 * load.requests} answers")
        for cache, side in (("on", on), ("off", off)):
            for name, value in side.figures().items():
                kept.add(f"001-7 {cache}: {name}", value)
    with_cache, without = (_medians(kept, f"001-7 {cache}: ") for cache in ("on", "off"))
    ratios = {name: with_cache[name] / (without[name] or 1.0) for name in without if name != "hits"}
    rows = [{"cache": "on", **with_cache}, {"cache": "off", **without}, {"cache": "on / off", **ratios}]
    goal = f"hits 0.37 to 0.38, TTFT <= 0.75 times, TPOT lower; {load.requests} requests at {load.rate_per_s:g}/s"
    return {"row": "001-7", "goal": goal, "rows": rows}


def in_turns(*sides: Side) -> Iterator[int]:
    """Serve all requests of all sides. Return after each step how many answers have ended."""
    while unfinished := [side for side in sides if side.unfinished]:
        min(unfinished, key=lambda side: side.now_s).step()
        yield sum(side.ended for side in sides)


def _medians(kept: Kept, side: str) -> dict[str, float]:
    return {name.removeprefix(side): kept.median(name) for name in kept.series if name.startswith(side)}


class Side:
    """One engine and its requests. Its clock counts the seconds of its own steps, by the bench's clock, so on
    a CPU other work of the machine does not count. The clock jumps to the next request where the engine is
    idle.
    """

    def __init__(self, bench: Bench, load: Arrivals, *, cache: CacheOptions | None, seed: int) -> None:
        self._bench = bench
        self._engine = runs.engine_of(bench, cache=cache is not None, options=cache)
        self._made = _requests(bench, load, seed=seed)
        self._waiting = deque(self._made)
        self._token_s: defaultdict[RequestId, list[float]] = defaultdict(list)
        self.now_s = 0.0

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._engine.num_unfinished)

    @property
    def ended(self) -> int:
        return len(self._made) - len(self._waiting) - self._engine.num_unfinished

    def step(self) -> None:
        started_s = self._bench.now_s()
        if not self._engine.num_unfinished:
            self.now_s = max(self.now_s, self._waiting[0].arrival_s)
        while self._waiting and self._waiting[0].arrival_s <= self.now_s:
            self._engine.add(self._waiting.popleft())
        outputs, _ = self._engine.step(now=self.now_s)
        self.now_s += self._bench.now_s() - started_s
        for output in outputs:
            self._token_s[output.request.request_id].append(self.now_s - output.request.arrival_s)

    def figures(self) -> dict[str, float]:
        """Return means and 99th percentiles, under the names of 001's tables."""
        times = list(self._token_s.values())
        found = {
            "hits": runs.hit_share(self._made),
            "requests/s": len(self._made) / self.now_s,
            "input tokens/s": sum(request.num_prompt_tokens for request in self._made) / self.now_s,
            "output tokens/s": sum(map(len, times)) / self.now_s,
        }
        series = {
            "TTFT": [one[0] for one in times],
            "TPOT": [(one[-1] - one[0]) / max(1, len(one) - 1) for one in times],
            "ITL": [after - before for one in times for before, after in pairwise(one)],
        }
        for name, seconds in series.items():
            found[f"{name} ms"] = 1000 * fmean(seconds)
            found[f"{name} P99"] = 1000 * percentile(seconds, 0.99)
        return found


def _requests(bench: Bench, load: Arrivals, *, seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = bench.text_of(f"{seed} shared", load.shared_tokens)
    made, at_s = list[Request](), 0.0
    for n in range(load.requests):
        at_s += rng.expovariate(load.rate_per_s)
        prompt = shared + bench.text_of(f"{seed} own {n}", load.own_tokens)
        made.append(runs.request(str(n), prompt, max_tokens=load.answer_tokens, arrival_s=at_s))
    return made
