"""The routing rules: each puts the candidates in order, best first, and says in a word why the first is first.

A rule is one class and one line in `RULES`. Rules keep no reference to endpoints between picks; ties are broken by
chance, since a fixed order is a bias that feeds itself. Called by `choosing`; `views` shows people the terms of a score.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import xxhash

from epp.policy import PolicySpec, RuleName
from epp.scheduling.candidates import View

_DISPLACING = 2.0
"""Loads that an adapter costs where no slot is free: its own, and that of the one it drops."""


class Rule(Protocol):
    """Order the candidates. `views` is never empty; the result is a permutation of it, and a reason label."""

    gated: ClassVar[bool]
    """Whether the load thresholds narrow the candidates first; the plain rules go without."""

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]: ...


def _by_load(views: Sequence[View], rng: random.Random) -> list[View]:
    return sorted(views, key=lambda v: (v.in_flight, rng.random()))


def _load_s(view: View, *, adapter: str, load_s: float) -> float:
    """Time that loading the adapter costs; dropping another one for it is paid for when that is loaded again."""
    if not adapter or view.has_adapter:
        return 0.0
    return load_s if view.free_slot else _DISPLACING * load_s


def cost_parts_s(view: View, *, spec: PolicySpec, adapter: str) -> dict[str, float]:
    """The terms of the least-cost score, in seconds, for people to read; their sum is the score."""
    own_s = view.uncached_tokens / view.rate
    load_s = _load_s(view, adapter=adapter, load_s=spec.lora.load_seconds)
    return {
        "backlog": view.backlog_tokens / view.rate,
        "prefill": spec.cost.uncached_token_weight * own_s,
        "stall": spec.cost.stalled_request_weight * view.in_flight * (own_s + load_s),
        "in_flight": spec.cost.running_request_tokens * view.in_flight / view.rate,
        "lora": spec.cost.uncached_token_weight * load_s,
    }


class LeastCost:
    """Least predicted cost in seconds: (B + (U + T V) (w + k L) + c L) / V. Equals by chance.

    A prompt's prefill, and an adapter's loading, delay the request itself and whoever waits behind it (w), and stall the
    answers that are being written there (k for each request in flight).
    """

    gated: ClassVar[bool] = True

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._cost = spec.cost
        self._load_s = spec.lora.load_seconds
        self._rng = rng

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        weight, stall = self._cost.uncached_token_weight, self._cost.stalled_request_weight
        per_request, load_s = self._cost.running_request_tokens, self._load_s
        for v in views:
            in_flight, rate = v.in_flight, v.rate
            own_s = v.uncached_tokens / rate
            if adapter:
                own_s += _load_s(v, adapter=adapter, load_s=load_s)
            v.score_s = (v.backlog_tokens + per_request * in_flight) / rate + own_s * (
                weight + stall * in_flight
            )
        # By chance also behind the first: a fixed second would get all that a dead first leaves.
        chance = self._rng.random
        ordered = sorted(views, key=lambda v: (v.score_s, chance()))
        best = ordered[0]
        if best.matched_tokens:
            return ordered, "prefix"
        return ordered, "lora" if adapter and best.has_adapter else "load"


class Affinity:
    """The 0602 proposal's plain rule: where the adapter is, else where a slot is free; the longest match; the least load."""

    gated: ClassVar[bool] = True

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        chance = self._rng.random
        ordered = sorted(
            views,
            key=lambda v: (
                not v.has_adapter,
                not v.has_adapter and not v.free_slot,
                -v.matched_tokens,
                v.in_flight,
                chance(),
            ),
        )
        return ordered, "prefix" if ordered[0].matched_tokens else "load"


class RoundRobin:
    """Each in turn, by name."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._last = ""

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        ordered = sorted(views, key=lambda v: v.name)
        first = next((i for i, v in enumerate(ordered) if v.name > self._last), 0)
        ordered = ordered[first:] + ordered[:first]
        self._last = ordered[0].name
        return ordered, "turn"


class Random:
    """Any, each as likely as another."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        return self._rng.sample(views, len(views)), "chance"


class LeastLoad:
    """Fewest requests in flight."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        return _by_load(views, self._rng), "load"


class PowerOfTwo:
    """Two by chance, the less loaded of them first, the other second."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        shuffled = self._rng.sample(views, len(views))
        shuffled[:2] = sorted(shuffled[:2], key=lambda v: v.in_flight)
        return shuffled, "load"


class Session:
    """Rendezvous hashing of the session header: each session keeps its endpoint while the endpoint stays.

    Endpoints that come or go move only their own share of the sessions. A request without a session goes by load.
    """

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, views: Sequence[View], *, session: str, adapter: str) -> tuple[list[View], str]:
        if not session:
            return _by_load(views, self._rng), "load"
        seed = xxhash.xxh3_64_intdigest(session.encode())
        ordered = sorted(views, key=lambda v: xxhash.xxh3_64_intdigest(v.name.encode(), seed), reverse=True)
        return ordered, "session"


RULES: Mapping[RuleName, Callable[[PolicySpec, random.Random], Rule]] = {
    "least-cost": LeastCost,
    "affinity": Affinity,
    "round-robin": RoundRobin,
    "random": Random,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "session": Session,
}
"""By the policy's name for it."""
