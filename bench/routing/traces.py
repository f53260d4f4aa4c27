"""Turns public request traces into workloads (`--trace PATH`). `bench.load.trace` reads the files.

A trace of Azure's kind has no prefixes, so they are made up: half of the requests take one of 200 shared
starts by Zipf, as long as up to two thirds of the prompt.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from bench.load.trace import BLOCK_TOKENS, OWN_IDS, Call, read
from bench.routing import workloads
from bench.routing.workloads import SYSTEM_IDS, Spec, Timed
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest

_MOST_TOKENS = 120_000


@functools.cache
def trace_spec(path: Path) -> Spec:
    """Return the trace as a workload: the first requests, with their gaps scaled to a mean of one.

    Each process reads the trace once.
    """
    calls, name = read(path), path.name.split(".")[0]
    if calls[0].blocks[0] >= OWN_IDS:
        return Spec(name=name, kind="open", make=functools.partial(_azure, calls))
    return Spec(name=name, kind="open", block_tokens=BLOCK_TOKENS, make=functools.partial(_mooncake, calls))


def _timed(at_s: Sequence[float], requests: Sequence[SimRequest]) -> list[Timed]:
    mean = (at_s[-1] - at_s[0]) / max(1, len(at_s) - 1) or 1.0
    gaps = [0.0, *((b - a) / mean for a, b in itertools.pairwise(at_s))]
    return [Timed(gap, request) for gap, request in zip(gaps, requests, strict=True)]


def _mooncake(calls: Sequence[Call], rng: random.Random, count: int) -> list[Timed]:
    """Make the requests of a trace. The seed exchanges those within a second, because otherwise all seeds
    would give the same requests.
    """
    stamped = sorted((call.at_s + 3 * rng.random(), n) for n, call in enumerate(calls[:count]))
    return _timed([at for at, _ in stamped], [_request(calls[n], n) for _, n in stamped])


def _request(call: Call, number: int) -> SimRequest:
    left = call.prompt_tokens
    segments = []
    for block in call.blocks:
        segments.append(Segment(SYSTEM_IDS + block, min(BLOCK_TOKENS, left)))
        left -= BLOCK_TOKENS
    return SimRequest(
        request_id=number,
        segments=tuple(segments),
        answer=Segment(workloads.OWN_IDS + number, call.output_tokens),
    )


def _azure(calls: Sequence[Call], rng: random.Random, count: int) -> list[Timed]:
    weights = [1 / (rank + 1) for rank in range(200)]
    starts = [rng.randrange(256, 3000) for _ in weights]
    requests = []
    for number, call in enumerate(calls[:count]):
        prompt = min(max(2, call.prompt_tokens), _MOST_TOKENS)
        segments: list[Segment] = []
        if rng.random() < 0.5:
            which = rng.choices(range(200), weights)[0]
            shared = min(starts[which], prompt * 2 // 3)
            if shared:
                segments.append(Segment(SYSTEM_IDS + which, shared))
                prompt -= shared
        own = workloads.OWN_IDS + 2 * number
        requests.append(
            SimRequest(
                request_id=number,
                segments=(*segments, Segment(own, prompt)),
                answer=Segment(own + 1, call.output_tokens),
            )
        )
    return _timed([call.at_s for call in calls[:count]], requests)
