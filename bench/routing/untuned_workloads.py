"""Makes workloads on which no constant of the product's rule was chosen, because they were written when the
rule was final.

Sizes are tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from bench.routing.workloads import SYSTEM_IDS, Spec, Timed, Turn, length, made_request, own_id
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest


def sizes(rng: random.Random, count: int) -> list[Timed]:
    """Return prompts that share nothing: nine in ten have about 150 tokens, and one in ten has about
    16,000.
    """
    made = []
    for n in range(count):
        long = rng.random() < 0.1
        own = length(rng, mean=16_000 if long else 150, sigma=0.5, least=16, most=60_000)
        answer = length(rng, mean=250, sigma=0.6, least=8, most=1500)
        made.append(Timed(rng.expovariate(1), made_request(n, (), own, answer)))
    return made


def forks(rng: random.Random, count: int) -> list[Timed]:
    """Return the requests of searches: a long history is continued in two to four ways at the same moment,
    and some of these continuations are continued again.
    """
    start = Segment(SYSTEM_IDS, 1500)
    grown: list[tuple[Segment, ...]] = []
    made: list[Timed] = []
    while len(made) < count:
        base = grown[-1 - min(len(grown) - 1, int(rng.expovariate(1 / 25)))] if grown else ()
        if not base or rng.random() < 0.12 or sum(s.num_tokens for s in base) > 40_000:
            base = (start, Segment(own_id(2_000_000 + len(made)), rng.randint(2000, 8000)))
        width = rng.randint(2, 4)
        for branch in range(width):
            n = len(made)
            step = Segment(own_id(n), length(rng, mean=300, sigma=0.8, least=16, most=3000))
            answer = Segment(own_id(n) + 1, length(rng, mean=400, sigma=0.6, least=32, most=1500))
            request = SimRequest(request_id=n, segments=(*base, step), answer=answer, session="")
            made.append(Timed(0.0 if branch else width * rng.expovariate(1), request))
            grown.append((*base, step, answer))
    return made[:count]


def clock(rng: random.Random, count: int, *, every: int = 150) -> list[Timed]:
    """Return prompts with 300 shared tokens, then the time of day, then 6,000 shared tokens. The time changes
    after every 150 requests, so the cached prefixes are useless from then on.
    """
    made = []
    for n in range(count):
        era = n // every
        shared = (Segment(SYSTEM_IDS, 300), Segment(SYSTEM_IDS + 1 + era, 6000))
        own = length(rng, mean=500, sigma=0.8, least=16, most=5000)
        answer = length(rng, mean=250, sigma=0.6, least=16, most=1500)
        made.append(Timed(rng.expovariate(1), made_request(n, shared, own, answer)))
    return made


def writers(rng: random.Random, count: int) -> list[Timed]:
    """Return requests with 20 shared prompts of 4,000 tokens. Three in four answers are short, the others
    have about 3,000 tokens.
    """
    made = []
    for n in range(count):
        shared = (Segment(SYSTEM_IDS + rng.randrange(20), 4000),)
        own = length(rng, mean=300, sigma=0.8, least=16, most=4000)
        long = rng.random() < 0.25
        answer = length(rng, mean=3000 if long else 60, sigma=0.4, least=4, most=8000)
        made.append(Timed(rng.expovariate(1), made_request(n, shared, own, answer)))
    return made


def comers(rng: random.Random, count: int, *, at_once: int = 30, stay: int = 120) -> list[Timed]:
    """Return requests of tenants that come and go: there are 30 at a time. Each has a prompt of 1,000 to
    12,000 tokens that is used about 120 times within a short time, and then never again.
    """
    there: list[Segment] = []
    seen = 0
    made = []
    for n in range(count):
        if len(there) < at_once or rng.random() < 1 / stay:
            if len(there) >= at_once:
                there.pop(rng.randrange(len(there)))
            there.append(Segment(SYSTEM_IDS + seen, rng.randint(1000, 12_000)))
            seen += 1
        own = length(rng, mean=300, sigma=0.8, least=16, most=4000)
        answer = length(rng, mean=200, sigma=0.6, least=8, most=1000)
        made.append(Timed(rng.expovariate(1), made_request(n, (rng.choice(there),), own, answer)))
    return made


def tool_sessions(rng: random.Random) -> Iterator[Sequence[Turn]]:
    """Yield sessions of agents whose tools give long answers. They have a shared start of 3,000 tokens, 3 to
    15 turns that add about 12,000 tokens each, and answers of 80 tokens.
    """
    while True:
        yield [
            Turn(
                added_tokens=length(rng, mean=12_000, sigma=1.0, least=100, most=60_000) if index else 400,
                answer_tokens=length(rng, mean=80, sigma=0.6, least=16, most=400),
                think_s=rng.expovariate(1 / 4),
                system=None if index else Segment(SYSTEM_IDS + rng.randrange(3), 3000),
            )
            for index in range(rng.randint(3, 15))
        ]


UNTUNED: Mapping[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(name="sizes", kind="open", make=sizes),
        Spec(name="forks", kind="open", make=forks),
        Spec(name="clock", kind="open", make=clock),
        Spec(name="writers", kind="open", make=writers),
        Spec(name="comers", kind="open", make=comers),
        Spec(
            name="tools",
            kind="closed",
            sessions=tool_sessions,
            block_tokens=512,
        ),
    )
}
