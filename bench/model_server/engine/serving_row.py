"""Measures row 001-7 on the engine itself, without HTTP: requests come at random times by the clock, with the
cache and without. The command calls this module.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench, Kept, Say
from bench.tables import percentile
from model_server.core.request import Request, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    requests: int
    shared_tokens: int
    own_tokens: int
    answer_tokens: int
    rate_per_s: float


WHOLE = Arrivals(requests=500, shared_tokens=336, own_tokens=560, answer_tokens=150, rate_per_s=8.0)
"""The document's load, with its lengths in whole blocks."""
SMALL = Arrivals(requests=24, shared_tokens=336, own_tokens=560, answer_tokens=8, rate_per_s=1.5)


def serving(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> dict[str, Any]:
    """Measure row 001-7: how a shared start changes times and throughput when requests come at random
    times.
    """
    load = WHOLE if bench.whole else SMALL
    load = replace(load, requests=bench.requests or load.requests)

    def serve(repeat: int, *, cache: bool) -> float:
        row = run(bench, load, cache=cache, seed=repeat)
        for name, value in row.items():
            kept.add(f"001-7 {name} {cache}", value)
        return row["TTFT ms"]

    sides = {
        "001-7 with": lambda repeat: serve(repeat, cache=True),
        "001-7 without": lambda repeat: serve(repeat, cache=False),
    }
    kept.in_turns(sides, repeats=repeats, say=say)
    prefix, end = "001-7 ", " True"
    names = [name[len(prefix) : -len(end)] for name in kept.series if name.endswith(end) and name.startswith(prefix)]  # fmt: skip
    medians = {
        cache: {name: kept.median(f"001-7 {name} {cache}") for name in names} for cache in (True, False)
    }
    ratios = {name: medians[True][name] / (medians[False][name] or 1.0) for name in names if name != "hits"}
    rows = [
        {"cache": "on", **medians[True]},
        {"cache": "off", **medians[False]},
        {"cache": "on / off", **ratios},
    ]
    goal = f"hits 0.37 to 0.38, TTFT <= 0.75 times, TPOT lower; {load.requests} requests at {load.rate_per_s:g}/s"
    return {"row": "001-7", "goal": goal, "rows": rows}


def run(bench: Bench, load: Arrivals, *, cache: bool, seed: int) -> dict[str, float]:
    """Return means and 99th percentiles, under the names of 001's tables."""
    rng = random.Random(seed)
    shared = bench.text_of(f"{seed} shared", load.shared_tokens)
    engine = runs.engine_of(bench, cache=cache)
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
    started = time.monotonic()
    while waiting or engine.num_unfinished:
        while waiting and waiting[-1][0] <= time.monotonic() - started:
            engine.add(waiting.pop()[1])
        if not engine.num_unfinished:
            time.sleep(max(0.0, waiting[-1][0] - (time.monotonic() - started)))
            continue
        outputs, _ = engine.step(now=time.monotonic())
        bench.now_s()  # On a GPU this waits until the device has done its work.
        now = time.monotonic() - started
        for output in outputs:
            request_id = output.request.request_id
            token_s[request_id].append(now - sent_s[request_id])
    elapsed_s, times = time.monotonic() - started, list(token_s.values())
    found = {
        "hits": runs.hit_share(made),
        "requests/s": len(made) / elapsed_s,
        "input tokens/s": sum(request.num_prompt_tokens for request in made) / elapsed_s,
        "output tokens/s": sum(map(len, times)) / elapsed_s,
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
