"""Measures row 001-7 on the engine itself, without HTTP: requests come at random times by the clock, with the
cache and without. The command calls this module.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
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


WHOLE = Arrivals(requests=500, shared_tokens=330, own_tokens=550, answer_tokens=150, rate_per_s=8.0)
"""The document's load. Of 330 shared tokens, 20 blocks of 16 can be found: 36.4 % of a prompt. The document's
37.5 % are all 330, which partial blocks find.
"""
SMALL = replace(WHOLE, requests=24, rate_per_s=0.5)
"""The same at a rate that is near what four layers of SmolLM2 compute without the cache on one CPU thread."""
SIDES = {"on": CacheOptions(partial_blocks=True), "off": None}


def serving(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> dict[str, Any]:
    """Measure row 001-7: how a shared start changes times and throughput when requests come at random
    times.
    """
    load = WHOLE if bench.whole else SMALL
    load = replace(load, requests=bench.requests or load.requests)

    def serve(repeat: int, *, cache: str) -> float:
        row = run(bench, load, cache=SIDES[cache], seed=repeat)
        for name, value in row.items():
            kept.add(f"001-7 {name}, {cache}", value)
        return row["TTFT ms"]

    kept.in_turns({cache: partial(serve, cache=cache) for cache in SIDES}, repeats=repeats, say=say)
    on, off = (_medians(kept, cache) for cache in SIDES)
    ratios = {name: on[name] / (off[name] or 1.0) for name in on if name != "hits"}
    rows = [{"cache": "on", **on}, {"cache": "off", **off}, {"cache": "on / off", **ratios}]
    goal = f"hits 0.37 to 0.38, TTFT <= 0.75 times, TPOT lower; {load.requests} requests at {load.rate_per_s:g}/s"
    return {"row": "001-7", "goal": goal, "rows": rows}


def _medians(kept: Kept, cache: str) -> dict[str, float]:
    names = [name for name in kept.series if name.startswith("001-7 ") and name.endswith(f", {cache}")]
    return {name.removeprefix("001-7 ").removesuffix(f", {cache}"): kept.median(name) for name in names}


def run(bench: Bench, load: Arrivals, *, cache: CacheOptions | None, seed: int) -> dict[str, float]:
    """Return means and 99th percentiles, under the names of 001's tables. The clock is the bench's own, so on
    a CPU other work of the machine does not count. It jumps to the next request where the engine is idle.
    """
    rng = random.Random(seed)
    shared = bench.text_of(f"{seed} shared", load.shared_tokens)
    engine = runs.engine_of(bench, cache=cache is not None, options=cache)
    waiting: list[tuple[float, Request]] = []
    at_s = 0.0
    for n in range(load.requests):
        at_s += rng.expovariate(load.rate_per_s)
        prompt = shared + bench.text_of(f"{seed} own {n}", load.own_tokens)
        waiting.append((at_s, runs.request(str(n), prompt, max_tokens=load.answer_tokens)))
    made = [request for _, request in waiting]
    sent_s = {request.request_id: at_s for at_s, request in waiting}
    waiting.reverse()
    token_s: defaultdict[RequestId, list[float]] = defaultdict(list)
    started_s = bench.now_s()
    now_s = 0.0
    while waiting or engine.num_unfinished:
        if not engine.num_unfinished and now_s < waiting[-1][0]:
            started_s -= waiting[-1][0] - now_s
            now_s = waiting[-1][0]
        while waiting and waiting[-1][0] <= now_s:
            engine.add(waiting.pop()[1])
        outputs, _ = engine.step(now=now_s)
        now_s = bench.now_s() - started_s
        for output in outputs:
            request_id = output.request.request_id
            token_s[request_id].append(now_s - sent_s[request_id])
    times = list(token_s.values())
    found = {
        "hits": runs.hit_share(made),
        "requests/s": len(made) / now_s,
        "input tokens/s": sum(request.num_prompt_tokens for request in made) / now_s,
        "output tokens/s": sum(map(len, times)) / now_s,
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
