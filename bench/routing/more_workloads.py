"""Makes further workloads, which the routing benchmark runs only when they are named, and the mixtures of the
flow benchmark.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from bench.routing.workloads import SYSTEM_IDS, Spec, Timed, Turn, length, made_request, one_client, own_id
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest

INTERACTIVE = 10
"""The priority of people who wait for the answer."""
BURST = 10.0
DOCUMENTS = 2000


def retrieval(rng: random.Random, count: int) -> list[Timed]:
    """Return requests with a shared system prompt of 1,000 tokens, five of 2,000 documents (by Zipf, in any
    order), and a short question.
    """
    weights = list(itertools.accumulate(1 / (rank + 1) ** 1.05 for rank in range(DOCUMENTS)))
    sizes = [length(rng, mean=800, sigma=0.5, least=100, most=3000) for _ in range(DOCUMENTS)]
    made = []
    for n in range(count):
        found = dict.fromkeys(rng.choices(range(DOCUMENTS), cum_weights=weights, k=5))
        shared = [Segment(SYSTEM_IDS, 1000), *(Segment(SYSTEM_IDS + 1 + d, sizes[d]) for d in found)]
        question, answer = 20 + rng.randrange(80), length(rng, mean=250, sigma=0.6, least=16, most=1200)
        made.append(Timed(rng.expovariate(1), made_request(n, shared, question, answer)))
    return made


def coding_sessions(rng: random.Random) -> Iterator[Sequence[Turn]]:
    """Yield sessions of coding agents. They have a shared start of 8,000 tokens, 20 to 60 turns, and 50,000
    to 150,000 tokens at the end.
    """
    while True:
        turns, total = rng.randint(20, 60), rng.randint(50_000, 150_000)
        parts = [rng.lognormvariate(0, 1) for _ in range(turns)]
        scale = (total - 8000) / sum(parts)
        yield [
            Turn(
                added_tokens=max(20, int(part * scale)),
                answer_tokens=length(rng, mean=250, sigma=0.7, least=16, most=2000),
                think_s=rng.expovariate(1 / 3),
                system=None if index else Segment(SYSTEM_IDS + rng.randrange(3), 8000),
            )
            for index, part in enumerate(parts)
        ]


def fan_out(rng: random.Random, count: int, *, width: int = 8) -> list[Timed]:
    """Return requests of which eight at a time come at the same moment with the same prompt, as when one
    question asks for eight answers.
    """
    made: list[Timed] = []
    while len(made) < count:
        first = len(made)
        prompt = (
            Segment(SYSTEM_IDS, 600),
            Segment(own_id(first), length(rng, mean=3000, sigma=0.8, least=100, most=20_000)),
        )
        for n in range(first, first + width):
            request = SimRequest(
                request_id=n,
                segments=prompt,
                answer=Segment(own_id(n) + 1, length(rng, mean=300, sigma=0.6, least=16, most=1500)),
            )
            made.append(Timed(0.0 if n > first else width * rng.expovariate(1), request))
    return made[:count]


def reasoning(rng: random.Random, count: int) -> list[Timed]:
    """Return requests with short questions and answers of 4,000 tokens."""
    return [
        Timed(
            rng.expovariate(1),
            made_request(
                n,
                (Segment(SYSTEM_IDS + rng.randrange(4), 500),),
                length(rng, mean=400, sigma=0.8, least=16, most=4000),
                length(rng, mean=4000, sigma=0.5, least=500, most=16_000),
            ),
        )
        for n in range(count)
    ]


def diurnal(rng: random.Random, count: int) -> list[Timed]:
    """Return the requests of a day. Six in ten come from people, whose number rises and falls by 80 %. The
    others are long requests of batch jobs.
    """
    people, batch, swing = 0.6, 0.4, 0.8
    most = people * (1 + swing) + batch
    made: list[Timed] = []
    now = last = 0.0
    while len(made) < count:
        now += rng.expovariate(most)
        drawn = rng.random() * most
        n = len(made)
        if drawn < batch:
            request = made_request(
                n,
                (Segment(SYSTEM_IDS + 9, 300),),
                length(rng, mean=5000, sigma=0.8, least=200, most=30_000),
                length(rng, mean=300, sigma=0.5, least=16, most=1500),
            )
        elif drawn < batch + people * (1 + swing * math.sin(2 * math.pi * now / count)):
            request = made_request(
                n,
                (Segment(SYSTEM_IDS + rng.randrange(4), 1500),),
                length(rng, mean=600, sigma=1.0, least=16, most=8000),
                length(rng, mean=250, sigma=0.6, least=16, most=1200),
            )
            request = replace(request, priority=INTERACTIVE)
        else:
            continue
        made.append(Timed(now - last, request))
        last = now
    return made


def classification(rng: random.Random, count: int) -> list[Timed]:
    """Return requests with short answers. A prompt has one of 12 instructions of 600 tokens and a text of 300
    on average. An answer has 1 to 8 tokens.
    """
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(12)))
    return [
        Timed(
            rng.expovariate(1),
            made_request(
                n,
                (Segment(SYSTEM_IDS + rng.choices(range(12), cum_weights=weights)[0], 600),),
                length(rng, mean=300, sigma=0.9, least=8, most=6000),
                rng.randint(1, 8),
            ),
        )
        for n in range(count)
    ]


def documents(rng: random.Random, count: int) -> list[Timed]:
    """Return requests about long documents of 10,000 to 120,000 tokens. Each document is asked about three to
    six times, seconds to minutes apart.
    """
    made: list[tuple[float, SimRequest]] = []
    arrived = 0.0
    while len(made) < count:
        arrived += rng.expovariate(1 / 4.5)
        document = Segment(
            own_id(1_000_000 + len(made)), length(rng, mean=35_000, sigma=0.8, least=10_000, most=120_000)
        )
        at = arrived
        for _ in range(rng.randint(3, 6)):
            question, answer = 20 + rng.randrange(180), length(rng, mean=300, sigma=0.6, least=16, most=1500)
            made.append((at, made_request(len(made), (Segment(SYSTEM_IDS, 400), document), question, answer)))
            at += rng.lognormvariate(3, 1)
    return _in_turn(made[:count])


def tenants(rng: random.Random, count: int) -> list[Timed]:
    """Return requests of 500 tenants by Zipf, each with a system prompt of 500 to 6,000 tokens."""
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(500)))
    sizes = [length(rng, mean=2000, sigma=0.7, least=500, most=6000) for _ in range(500)]
    made = []
    for n in range(count):
        tenant = rng.choices(range(500), cum_weights=weights)[0]
        own, answer = (
            length(rng, mean=400, sigma=0.9, least=16, most=6000),
            length(rng, mean=200, sigma=0.6, least=8, most=1000),
        )
        made.append(
            Timed(
                rng.expovariate(1),
                made_request(n, (Segment(SYSTEM_IDS + tenant, sizes[tenant]),), own, answer),
            )
        )
    return made


def bursts(rng: random.Random, count: int, *, every: int = 250, width: int = 100) -> list[Timed]:
    """Return the requests of `tenants`, but 100 of each 250 come at ten times the rate of the others."""
    calm = every / (every - width + width / BURST)
    return [
        replace(t, gap=t.gap * (calm / BURST if n % every >= every - width else calm))
        for n, t in enumerate(tenants(rng, count))
    ]


def _in_turn(made: Sequence[tuple[float, SimRequest]]) -> list[Timed]:
    """Return requests at their times, as gaps with a mean of one."""
    ordered = sorted(made, key=lambda each: each[0])
    mean = ordered[-1][0] / len(ordered)
    times = [0.0, *(at for at, _ in ordered)]
    return [
        Timed((at - before) / mean, replace(request, request_id=n))
        for n, (before, (at, request)) in enumerate(zip(times, ordered, strict=False))
    ]


MORE: Mapping[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(name="retrieval", kind="open", make=retrieval),
        Spec(
            name="coding",
            kind="closed",
            sessions=coding_sessions,
            block_tokens=512,
        ),
        Spec(name="fan-out", kind="open", make=fan_out),
        Spec(name="reasoning", kind="open", make=reasoning, num_requests=1000),
        Spec(name="diurnal", kind="open", make=diurnal),
        Spec(name="classification", kind="open", make=classification),
        Spec(name="documents", kind="open", make=documents, block_tokens=512),
        Spec(name="tenants", kind="open", make=tenants),
        Spec(name="bursts", kind="open", make=bursts),
    )
}


# -- mixtures ------------------------------------------------------------------------------------------------


def greedy_tenant(timed: Sequence[Timed], rng: random.Random, *, light: int = 4) -> list[Timed]:
    """Give each request a tenant. One tenant sends ten times as much as each of the others."""
    names = ["greedy", *(f"light-{n}" for n in range(light))]
    weights = [10, *[1] * light]
    return [replace(t, request=replace(t.request, tenant=rng.choices(names, weights)[0])) for t in timed]


# -- further workloads: the price of a copy was chosen on `clock` and `forks` --------------------------------


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
        Spec(name="forks", kind="open", make=forks),
        Spec(name="clock", kind="open", make=clock),
        Spec(
            name="tools",
            kind="closed",
            sessions=tool_sessions,
            block_tokens=512,
        ),
        Spec(
            name="serial",
            kind="closed",
            sessions=partial(one_client, prompts=24, tokens=24_000),
            users=1,
            block_tokens=512,
        ),
    )
}


# -- shapes that others published; docs/bench-routing.md has their figures -----------------------------------


def code_agents(rng: random.Random) -> Iterator[Sequence[Turn]]:
    """Yield llm-d's agents that write code: 20 turns after a context of 160,000 tokens in the mean, which is
    cut at 400,000 to fit a cache. Their tools take 15 s in the mean.
    """
    while True:
        context = length(rng, mean=160_000, sigma=1.07, least=10_000, most=400_000)
        yield [
            Turn(
                added_tokens=length(rng, mean=1500, sigma=0.7, least=100, most=8000) + (0 if n else context),
                answer_tokens=length(rng, mean=425, sigma=1.2, least=16, most=8000),
                think_s=length(rng, mean=15_000, sigma=1.6, least=100, most=200_000) / 1000 if n else 0.0,
                system=None if n else Segment(SYSTEM_IDS, 3000),
            )
            for n in range(20)
        ]


def grouped(
    rng: random.Random, count: int, *, groups: int, shared: int, own: int, answer: int
) -> list[Timed]:
    """Return requests of equal groups, each with a beginning of its own."""
    return [
        Timed(
            rng.expovariate(1),
            made_request(n, (Segment(SYSTEM_IDS + rng.randrange(groups), shared),), own, answer),
        )
        for n in range(count)
    ]


PUBLIC: Mapping[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(name="code-agents", kind="closed", sessions=code_agents, block_tokens=512),
        Spec(
            name="prefixes",
            kind="open",
            make=partial(grouped, groups=600, shared=1000, own=100, answer=100),
        ),
        Spec(
            name="one-group",
            kind="open",
            make=partial(grouped, groups=1, shared=2548, own=7252, answer=430),
            num_requests=400,
        ),
    )
}
