"""Makes the workloads: requests that are made up from a seed, or the requests of a trace, at a rate that the
caller gives.

Open loops are lists of requests in order with gaps of mean 1, which the rate scales. Closed loops are users
who think. The same seed gives the same requests. Sizes are in tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from model_server.sim.prompts import Segment
from model_server.sim.request import Record, SimRequest

SYSTEM_IDS = 1 << 20
"""Segment ids of shared prompts start here. Ids of a request's own text are far above."""
OWN_IDS = 1 << 40


@dataclass(frozen=True, slots=True)
class Timed:
    """A request, and its gap to the request before, in units of the mean gap."""

    gap: float
    request: SimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A workload: how it is made, and on what servers it runs."""

    name: str
    kind: Literal["open", "closed"]
    make: Callable[[random.Random, int], Sequence[Timed]] | None = None
    """Makes this number of requests, for an open loop."""
    sessions: Callable[[random.Random], Iterator[Sequence[Turn]]] | None = None
    """Makes an endless supply of sessions, for a closed loop."""
    users: int = 0
    """The users of a closed loop; 0: as many as the load needs."""
    block_tokens: int = 128
    num_requests: int = 2000
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of a session: what the user adds, how long the answer is, and how long the user thinks before
    the step.
    """

    added_tokens: int
    answer_tokens: int
    think_s: float
    system: Segment | None = None
    """The shared start of the first turn."""


def label(workload: str) -> str:
    """Return the name of the workload; for a trace, the name of its file."""
    return workload.rsplit("/", 1)[-1].split(".", maxsplit=1)[0]


def length(rng: random.Random, *, mean: float, sigma: float, least: int, most: int) -> int:
    """Return a log-normal length with about this mean."""
    return int(
        min(most, max(least, rng.lognormvariate(0, sigma) * mean / 2.718281828 ** (sigma * sigma / 2)))
    )


def own_id(number: int) -> int:
    return OWN_IDS + 2 * number


def made_request(
    number: int, shared: Sequence[Segment], own_tokens: int, answer_tokens: int, *, adapter: str = ""
) -> SimRequest:
    return SimRequest(
        request_id=number,
        segments=(*shared, Segment(own_id(number), own_tokens)),
        answer=Segment(own_id(number) + 1, answer_tokens),
        adapter=adapter,
    )


# -- open loops ----------------------------------------------------------------------------------------------


def no_sharing(rng: random.Random, count: int) -> list[Timed]:
    """Return requests whose prompts are all new and whose lengths vary widely."""
    return [
        Timed(
            rng.expovariate(1),
            made_request(
                n,
                (),
                length(rng, mean=3000, sigma=1.0, least=32, most=30_000),
                length(rng, mean=250, sigma=0.7, least=8, most=2000),
            ),
        )
        for n in range(count)
    ]


def shared_system_prompts(
    rng: random.Random, count: int, *, groups: int = 150, scale: float = 1.0
) -> list[Timed]:
    """Return requests of 150 groups. Each group has a system prompt of 6,000 tokens and five questions of
    1,200 tokens. Answers have 1,000 tokens. `scale` multiplies the lengths.
    """
    made = []
    for n in range(count):
        group, question = rng.randrange(groups), rng.randrange(5)
        shared = (Segment(SYSTEM_IDS + group, round(scale * 6000)),)
        own = Segment(SYSTEM_IDS + 1000 + group * 5 + question, round(scale * 1200))
        request = SimRequest(
            request_id=n,
            segments=(*shared, own),
            answer=Segment(
                own_id(n) + 1, round(scale * length(rng, mean=1000, sigma=0.2, least=300, most=2000))
            ),
        )
        made.append(Timed(rng.expovariate(1), request))
    return made


def hot_prefixes(rng: random.Random, count: int, *, prefixes: int = 64) -> list[Timed]:
    """Return requests over 64 prefixes of 8,192 tokens by Zipf 1.1. The most popular prefix has 5 % of the
    traffic, and half of it from half-way on.
    """
    weights = [1 / (rank + 1) ** 1.1 for rank in range(1, prefixes)]
    scale = 0.95 / sum(weights)
    calm = [0.05, *(w * scale for w in weights)]
    hot = [0.5, *(w * scale * 0.5 / 0.95 for w in weights)]
    made = []
    for n in range(count):
        prefix = rng.choices(range(prefixes), calm if n < count // 2 else hot)[0]
        shared = (Segment(SYSTEM_IDS + prefix, 8192),)
        own = length(rng, mean=900, sigma=0.5, least=64, most=4000)
        made.append(
            Timed(
                rng.expovariate(1),
                made_request(n, shared, own, length(rng, mean=200, sigma=0.5, least=16, most=1000)),
            )
        )
    return made


def adapters(rng: random.Random, count: int, *, kinds: int = 32) -> list[Timed]:
    """Return requests for 32 LoRA adapters by a power law. Each adapter has its own system prompt of 1,500
    tokens.
    """
    weights = [1 / (rank + 1) for rank in range(kinds)]
    made = []
    for n in range(count):
        which = rng.choices(range(kinds), weights)[0]
        shared = (Segment(SYSTEM_IDS + which, 1500),)
        own = length(rng, mean=800, sigma=0.8, least=32, most=8000)
        answer = length(rng, mean=200, sigma=0.6, least=16, most=1000)
        made.append(Timed(rng.expovariate(1), made_request(n, shared, own, answer, adapter=f"lora-{which}")))
    return made


def conversations(rng: random.Random, count: int) -> list[Timed]:
    """Return an open-loop replacement for a conversation trace: all prompts share a first block and are long,
    and turns come back.
    """
    first = Segment(SYSTEM_IDS, 512)
    grown: list[tuple[Segment, ...]] = []
    made = []
    for n in range(count):
        if grown and rng.random() < 0.45:
            at = max(0, len(grown) - 1 - int(rng.expovariate(1 / 150)))
            base = grown[at]
        else:
            base = (first,)
        own = Segment(own_id(n), length(rng, mean=6500, sigma=1.1, least=200, most=60_000))
        answer = Segment(own_id(n) + 1, length(rng, mean=340, sigma=0.6, least=8, most=1500))
        if sum(s.num_tokens for s in base) > 60_000:
            base = (first,)
        request = SimRequest(request_id=n, segments=(*base, own), answer=answer, session="")
        grown.append((*base, own, answer))
        made.append(Timed(rng.expovariate(1), request))
    return made


# -- closed loops --------------------------------------------------------------------------------------------


def chat_sessions(rng: random.Random) -> Iterator[Sequence[Turn]]:
    """Yield sessions of people who chat. They have a shared system prompt of 1,000 tokens, short turns, now
    and then a long pasted text, and time to think.
    """
    while True:
        turns = []
        for index in range(1 + min(14, int(rng.expovariate(1 / 5)))):
            long = rng.random() < 0.15
            turns.append(
                Turn(
                    added_tokens=length(rng, mean=4000 if long else 150, sigma=0.7, least=10, most=16_000),
                    answer_tokens=length(rng, mean=300, sigma=0.6, least=16, most=1500),
                    think_s=rng.expovariate(1 / 12),
                    system=None if index else Segment(SYSTEM_IDS + rng.randrange(4), 1000),
                )
            )
        yield turns


def agent_sessions(rng: random.Random) -> Iterator[Sequence[Turn]]:
    """Yield sessions of agents that call tools. They have a long shared start, many quick turns with large
    results, and little time to think.
    """
    while True:
        turns = []
        for index in range(4 + min(30, int(rng.expovariate(1 / 10)))):
            turns.append(
                Turn(
                    added_tokens=length(rng, mean=1500, sigma=1.0, least=50, most=12_000),
                    answer_tokens=length(rng, mean=120, sigma=0.6, least=16, most=800),
                    think_s=rng.expovariate(1 / 1.5),
                    system=None if index else Segment(SYSTEM_IDS + rng.randrange(6), 5000),
                )
            )
        yield turns


SPECS: Mapping[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(
            name="conversation",
            kind="open",
            make=conversations,
            block_tokens=512,
        ),
        Spec(name="b2b", kind="open", make=shared_system_prompts),
        Spec(name="hot", kind="open", make=hot_prefixes),
        Spec(name="lora", kind="open", make=adapters, adapters=32),
        Spec(name="none", kind="open", make=no_sharing),
        Spec(name="chat", kind="closed", sessions=chat_sessions),
        Spec(name="agents", kind="closed", sessions=agent_sessions),
    )
}


# -- in the form that the fleet needs ------------------------------------------------------------------------


class OpenLoop:
    """Sends requests at the given rate, whatever happens to earlier requests."""

    programs_s: Sequence[float] = ()

    def __init__(self, timed: Sequence[Timed], *, rate_per_s: float) -> None:
        self._timed = timed
        self._rate_per_s = rate_per_s

    @property
    def last_arrival_s(self) -> float:
        return sum(t.gap for t in self._timed) / self._rate_per_s

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        now = 0.0
        for timed in self._timed:
            now += timed.gap / self._rate_per_s
            yield now, timed.request

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        return ()


class Saturating:
    """Keeps this number of requests in flight: the next one comes when one ends. Measures how much a fleet
    can do.
    """

    def __init__(self, requests: Iterable[SimRequest], *, in_flight: int) -> None:
        self._requests = iter(requests)
        self._in_flight = in_flight

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        return [(0.0, request) for request in itertools.islice(self._requests, self._in_flight)]

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        return [(now, request) for request in itertools.islice(self._requests, 1)]


def one_client(_: random.Random, *, prompts: int, tokens: int) -> Iterator[Sequence[Turn]]:
    """Yield the requests of a client that sends one at a time: the same prompts, again and again. Give so
    many that they fit the fleet, but not one server. Every score is a tie but for noise.
    """
    for n in itertools.cycle(range(prompts)):
        yield [Turn(added_tokens=16, answer_tokens=16, think_s=0.2, system=Segment(SYSTEM_IDS + n, tokens))]


@dataclass(slots=True)
class _User:
    session: str
    turns: Iterator[Turn]
    segments: tuple[Segment, ...] = ()
    began_s: float = 0.0


@dataclass
class ClosedLoop:
    """Users with think time: each has one session after another until the time is up.
    A failed turn ends its session."""

    sessions: Iterator[Sequence[Turn]]
    _: KW_ONLY
    users: int
    until_s: float
    ramp_s: float
    speed: float = 1.0
    programs_s: list[float] = field(init=False, default_factory=list)
    """Seconds from the first turn to the last answer of each session that ended, pauses included."""
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)
    _open: dict[int, _User] = field(init=False, default_factory=dict)
    _num_sessions: int = field(init=False, default=0)

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        for index in range(self.users):
            yield from self._next(self._new_user(), self.ramp_s * index / self.users)

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        user = self._open.pop(record.request.request_id)
        if not record.completed:
            user = self._new_user()
        user.segments = (*record.request.segments, record.request.answer) if record.completed else ()
        return self._next(user, now) if now < self.until_s else ()

    def _new_user(self) -> _User:
        self._num_sessions += 1
        return _User(f"session-{self._num_sessions}", iter(next(self.sessions)))

    def _next(self, user: _User, now: float) -> Iterable[tuple[float, SimRequest]]:
        turn = next(user.turns, None)
        if turn is None:
            self.programs_s.append(now - user.began_s)
            user = self._new_user()
            turn = next(user.turns)
        number = next(self._numbers)
        sent_s = now + turn.think_s / self.speed
        if turn.system is not None:
            user.segments, user.began_s = (turn.system,), sent_s
        request = SimRequest(
            request_id=number,
            segments=(*user.segments, Segment(own_id(number), turn.added_tokens)),
            answer=Segment(own_id(number) + 1, turn.answer_tokens),
            session=user.session,
        )
        self._open[number] = user
        return [(sent_s, request)]
