"""Draws a workload from a number: `drawn-7` is always the same workload. A number that nobody has used gives
a workload that no rule was tuned on.

Drawn are the number of shared beginnings, the lengths of all parts, and whether requests go on from earlier
ones, come together or in bursts, and name adapters.
"""

import itertools
import math
import random
from functools import partial
from typing import NamedTuple

from bench.routing.workloads import SYSTEM_IDS, Spec, Timed, length, made_request
from model_server.sim.prompts import Segment

_PREFIX = "drawn-"
_LONGEST_TOKENS = 100_000


class Drawn(NamedTuple):
    """What is drawn. The lengths are means, in tokens."""

    beginnings: int  # shared ones, at a time
    zipf: float
    shared: float
    own: float
    own_sigma: float
    answer: float
    goes_on: float  # the share of requests that go on from an earlier one
    back: float  # how many requests ago the earlier one came
    together: int  # requests with the same beginning that come at one instant
    era: int  # after so many requests all beginnings are new; 0: they stay
    burst: float  # coefficient of variation of the gaps
    adapters: int


def drawn(name: str) -> Spec | None:
    """Return the workload `drawn-N`. None: the name is another one."""
    if not name.removeprefix(_PREFIX).isdecimal() or not name.startswith(_PREFIX):
        return None
    rng = random.Random(name)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    shape = Drawn(
        beginnings=int(between(1, 1000)),
        zipf=rng.uniform(0, 1.4),
        shared=between(200, 12_000),
        own=between(50, 8000),
        own_sigma=rng.uniform(0.3, 1.2),
        answer=between(4, 2000),
        goes_on=rng.choice((0, 0, 0.3, 0.6, 0.85)),
        back=between(5, 300),
        together=rng.choice((1, 1, 1, 1, 2, 4, 8)),
        era=rng.choice((0, 0, 0, 100, 400)),
        burst=rng.choice((1, 1, 2, 3)),
        adapters=rng.choice((0, 0, 0, 0, 24)),
    )
    return Spec(name=name, kind="open", make=partial(_made, shape), adapters=shape.adapters)


def _made(shape: Drawn, rng: random.Random, count: int) -> list[Timed]:
    weights = list(itertools.accumulate((rank + 1) ** -shape.zipf for rank in range(shape.beginnings)))
    sizes = [_length(rng, shape.shared, 0.5) for _ in weights]
    grown: list[tuple[int, tuple[Segment, ...]]] = []
    made: list[Timed] = []
    for n in range(count):
        branch = n % shape.together
        if not branch:
            kind = rng.choices(range(shape.beginnings), cum_weights=weights)[0]
            era = n // shape.era if shape.era else 0
            base: tuple[Segment, ...] = (Segment(SYSTEM_IDS + era * shape.beginnings + kind, sizes[kind]),)
            if grown and rng.random() < shape.goes_on:
                kind, base = grown[max(0, len(grown) - 1 - int(rng.expovariate(1 / shape.back)))]
        own, answer = _length(rng, shape.own, shape.own_sigma), _length(rng, shape.answer, 0.6)
        adapter = f"lora-{kind % shape.adapters}" if shape.adapters else ""
        request = made_request(n, base, own, answer, adapter=adapter)
        gap = rng.gammavariate(shape.burst**-2, shape.burst**2) * shape.together
        made.append(Timed(0.0 if branch else gap, request))
        if sum(s.num_tokens for s in base) < _LONGEST_TOKENS:
            grown.append((kind, (*request.segments, request.answer)))
    return made


def _length(rng: random.Random, mean: float, sigma: float) -> int:
    return length(rng, mean=mean, sigma=sigma, least=1, most=60_000)
