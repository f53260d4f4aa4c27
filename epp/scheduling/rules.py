"""The routing rules. Each puts the candidates in order, best first, and gives the reason of the choice in one
word.

A rule is one class and one line in `RULES`. Most rules are one expression over the columns of a snapshot.
Rules keep no references to endpoints between picks. Equal candidates are in random order, since a fixed order
would be a bias that strengthens itself. Called by `schedule`.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from math import ceil
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from epp.config.policy import PolicySpec, RuleName
from epp.scheduling.demand import AT_ONCE_S
from epp.scheduling.price import Numbers, cost_s
from epp.scheduling.snapshot import Floats, Ints, SchedulingRequest, Snapshot
from epp.types import Facts

MOST: int = 10
"""Number of candidates that a rule puts in order: enough for every fallback list and for the decision's
record."""
_NEAR = 1.05
"""Costs are estimates, so a cost of at most this many times the least cost counts as equally good."""
_ALIKE = 0.1
"""Servers hold the same prefix if the longest match is longer by at most this share."""
_LOOKING_AT_ONE = 2.0
"""Expected number of picks that consider the same server before their pickers know of each other's picks."""


class Weighed(Facts, frozen=True):
    """The input of a rule: one request and the candidates that may serve it."""

    seen: Snapshot
    asked: SchedulingRequest
    uncached_tokens: Floats
    """U: prompt tokens that each candidate would have to compute.
    All tokens of the prompt, if a match saves too little to count."""
    load_s: Floats | None = None
    """Time that loading the request's adapter costs each candidate; None: the request names no adapter."""

    def narrowed(self, places: Ints) -> Weighed:
        """Return the same request with only some of the candidates."""
        load_s = self.load_s[places] if self.load_s is not None else None
        return Weighed(self.seen.narrowed(places), self.asked, self.uncached_tokens[places], load_s)


class Ranked(NamedTuple):
    places: list[int]
    """Places of the best candidates, the best first: `MOST` of them, or all if there are fewer."""
    reason: str
    score_s: Floats | None = None
    """Predicted cost of each candidate in seconds, for rules that predict a cost."""


class Rule(Protocol):
    gated: ClassVar[bool]
    """Whether the load thresholds narrow the candidates first. The plain rules do not use thresholds."""

    def rank(self, weighed: Weighed) -> Ranked: ...


def fewest(key: Floats | Ints, rng: random.Random | None) -> list[int]:
    """Return places of the smallest numbers, the smallest first, at most `MOST`. Equal numbers are in random
    order; without `rng`, in their own order.

    The order is random behind the first place too: if the first server dies, a fixed second one would get all
    of its requests.
    """
    chance = rng.random if rng is not None else float
    if len(key) <= MOST:
        few = [(value, chance(), place) for place, value in enumerate(key.tolist())]
        return [place for _, _, place in sorted(few)]
    edge = np.sort(key)[
        MOST - 1
    ]  # here a sort is as fast as a partition, and it stays fast if most values are equal
    less, equals = (key < edge).nonzero()[0], (key == edge).nonzero()[0]
    values, places = key[less].tolist(), less.tolist()
    few = sorted([(values[n], chance(), place) for n, place in enumerate(places)])
    return [place for _, _, place in few] + _some_of(equals, MOST - len(few), rng)


def _some_of(places: Ints, count: int, rng: random.Random | None) -> list[int]:
    """Return so many of the places, each with the same probability and in random order; without `rng`, the
    first.
    """
    if rng is None:
        few: list[int] = places[:count].tolist()
        return few
    chance, size = rng.random, len(places)
    count = min(count, size)
    drawn = dict.fromkeys([int(chance() * size) for _ in range(count)])
    while len(drawn) < count:  # this takes a third of the time of `rng.sample`
        drawn[int(chance() * size)] = None
    return [places.item(n) for n in drawn]


class LeastCost:
    """Chooses the least predicted cost in seconds (`cost_s`). If several costs are nearly the least, chooses
    the candidate of these that holds most of the prompt: a copy on another server gains next to nothing, and
    takes room from other prefixes.
    """

    gated: ClassVar[bool] = True

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        cost = spec.cost
        # Zero-dimensional arrays, which numpy takes twice as fast as numbers.
        self._weight = np.array(cost.uncached_token_weight)
        self._stall = np.array(cost.stalled_request_weight)
        self._running_tokens = np.array(cost.running_request_tokens)
        self._failure_s = spec.failures.cost_seconds
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        seen, uncached = weighed.seen, weighed.uncached_tokens
        least = uncached[uncached.argmin()] if weighed.asked.matched else None  # a third of the time of `min`
        # Requests that come at once with the same prompt find it computed, so all share its stall price.
        stall = self._stall if weighed.asked.at_once == 1 else self._stall / weighed.asked.at_once
        score_s = cost_s(
            seen.undone_tokens,
            uncached,
            seen.in_flight,
            seen.rate,
            weighed.load_s,
            weight=self._weight,
            stall=stall,
            running_tokens=self._running_tokens,
        )
        if least is not None and (sharing := _sharing(weighed, least)) > 1:
            spared = (1 - 1 / sharing) * stall
            score_s = score_s - spared * seen.in_flight * (uncached - least) / seen.rate
        if seen.failure_share is not None:
            score_s = score_s + self._failure_s * seen.failure_share
        places = self._in_order(score_s, uncached, least)
        if seen.unreported_picks > _LOOKING_AT_ONE:
            counting_s = self._of_few(score_s, weighed, places[0])
            chosen = self._in_order(counting_s, uncached, least)[0]
            places = [chosen, *[place for place in places if place != chosen]][:MOST]
        first = places[0]
        if uncached[first] < weighed.asked.prompt_tokens:
            return Ranked(places, "prefix", score_s)
        holds = seen.has_adapter is not None and seen.has_adapter[first]
        return Ranked(places, "lora" if holds else "load", score_s)

    def _in_order(self, score_s: Floats, uncached: Floats, least: Numbers | None) -> list[int]:
        """Return the best candidates. least: the smallest value in `uncached`; None: no candidate holds a
        part of the prompt.
        """
        places = fewest(score_s, self._rng)
        return places if least is None else _holder_first(places, score_s, uncached, least)

    def _of_few(self, score_s: Floats, weighed: Weighed, first: int) -> Floats:
        """Return the scores when other pickers have sent many requests that this picker does not know of yet.
        Infinite: the candidate does not count.

        Otherwise all pickers would send these requests to the server that seems best to all of them. Also,
        the best of very many stale numbers seems better than it is, so a server that holds the prompt would
        lose it to that server. Therefore only a few of the candidates that hold least of the prompt count.
        They are drawn by chance, so that about two of the unknown requests consider the same server. The
        candidates that hold most of the prompt are drawn in the same way.
        """
        uncached, load_s = weighed.uncached_tokens, weighed.load_s
        few = max(2, int(_LOOKING_AT_ONE * len(uncached) / weighed.seen.unreported_picks))
        # A candidate must not be drawn if it is worse even when the best one gets all of these requests.
        unreported_s = weighed.seen.unreported_picks * weighed.asked.prompt_tokens / weighed.seen.rate[first]
        fair = score_s <= score_s[first] + unreported_s
        if load_s is not None:
            fair &= load_s == load_s[first]
        near = _ALIKE * weighed.asked.prompt_tokens
        counting = score_s.copy()
        for alike in (uncached >= uncached.max() - near, uncached <= uncached.min() + near):
            group = np.flatnonzero(alike & fair)
            if len(group) > few:
                # Random keys: with 1,000 candidates this takes a tenth of the time of `rng.sample`.
                keys = np.frombuffer(self._rng.randbytes(4 * len(group)), dtype=np.uint32)
                drawn = group[keys.argpartition(few)[:few]]
                counting[group] = np.inf
                counting[drawn] = score_s[drawn]
        return counting


def _sharing(weighed: Weighed, least: Numbers) -> float:
    """Return how many requests share the stall price of a further copy of the longest match.

    While this request waits at a holder, about as many requests for this prefix will come as came in an equal
    time before. If they are more than the holders' even part of all requests, the excess gains by the copy
    too. Each gains about half of what this request saves, since one more server then shares the holders'
    queues.

    If there are several holders and all of them are busier than the mean, this alone shows the demand.
    """
    seen = weighed.seen
    held = weighed.uncached_tokens <= least + _ALIKE * (weighed.asked.prompt_tokens - least)
    holders, servers = np.count_nonzero(held), len(held)
    if holders == servers:
        return 1.0
    sharing = 1.0
    if holders > 1 and seen.in_flight[held].min() * servers > seen.in_flight.sum():
        sharing = float(holders)
    if weighed.asked.earlier is not None:
        wait_s = float((seen.undone_tokens[held] / seen.rate[held]).min())
        count, of_all = weighed.asked.earlier.between(AT_ONCE_S, wait_s)
        sharing = max(sharing, 1 + (count - of_all * holders / servers) / 2)
    return sharing


def _holder_first(places: list[int], score_s: Floats, uncached: Floats, least: Numbers) -> list[int]:
    """Return the best candidates. Of those with nearly the least cost, the one with the fewest tokens to
    compute comes first.
    """
    first = places[0]
    if uncached[first] <= least:
        return places
    near = np.flatnonzero(score_s <= _NEAR * score_s[first])
    holder = int(near[np.lexsort((score_s[near], uncached[near]))[0]])
    if uncached[holder] == uncached[first]:
        return places
    return [holder, *[place for place in places if place != holder]][:MOST]


class Affinity:
    """The 0602 proposal's plain rule. It prefers servers that hold the adapter, then servers with a free slot
    for the adapter; among these the longest match; among equal matches the least load.
    """

    gated: ClassVar[bool] = True

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        seen, uncached = weighed.seen, weighed.uncached_tokens
        adapters = np.zeros(len(seen), dtype=np.int64)
        if seen.has_adapter is not None and seen.free_slot is not None:
            adapters = np.where(seen.has_adapter, 0, np.where(seen.free_slot, 1, 2))
        # Digits of one number: adapters before uncached tokens (below 2^31) before requests in flight (below
        # 2^30).
        key = (adapters * 2**31 + uncached.astype(np.int64)) * 2**30 + seen.burden().astype(np.int64)
        places = fewest(key, self._rng)
        return Ranked(places, "prefix" if uncached[places[0]] < weighed.asked.prompt_tokens else "load")


class RoundRobin:
    """Chooses each candidate in turn, in the order of names."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._last = ""

    def rank(self, weighed: Weighed) -> Ranked:
        seen = weighed.seen
        names = seen.roster.by_name
        next_turn = bisect_right(names, self._last)
        places = fewest((seen.turn() - next_turn) % len(names), None)
        self._last = seen.roster.names[seen.slots[places[0]]]
        return Ranked(places, "turn")


class Random:
    """Chooses by chance, each candidate with the same probability."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        return Ranked(_some(weighed, self._rng), "chance")


class LeastLoad:
    """Chooses the candidate with the fewest requests in flight."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        return Ranked(fewest(weighed.seen.burden(), self._rng), "load")


class PowerOfTwo:
    """Draws two candidates by chance. The less loaded one is the first choice, the other the second."""

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        places, burden = _some(weighed, self._rng), weighed.seen.burden()
        places[:2] = sorted(places[:2], key=lambda place: burden[place])
        return Ranked(places, "load")


class Session:
    """Rendezvous hashing of the session header: each session keeps its endpoint while the endpoint stays.

    Endpoints that come or go move only their own share of the sessions.
    A request without a session goes by load.
    """

    gated: ClassVar[bool] = False

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        if not weighed.asked.session:
            return Ranked(fewest(weighed.seen.burden(), self._rng), "load")
        distance = _distance(xxh3_64_intdigest(weighed.asked.session.encode()), weighed.seen)
        return Ranked(fewest(distance, None), "session")


class PrefixHash:
    """Consistent hashing of the prompt's beginning, with bounded loads (Mirrokni et al., arXiv 1608.01350).

    Equal beginnings go to the same endpoint. Every picker computes this endpoint by itself, so nothing has to
    be remembered or shared. If the endpoint has its bound of requests, the next endpoint in the key's order
    gets the request. Prompts without a key go by load.
    """

    gated: ClassVar[bool] = True

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._settings = spec.prefix_hash
        self._rng = rng

    def rank(self, weighed: Weighed) -> Ranked:
        seen, burden = weighed.seen, weighed.seen.burden()
        if not weighed.asked.beginning:
            return Ranked(fewest(burden, self._rng), "load")
        distance = _distance(weighed.asked.beginning, seen)
        fair = ceil(self._settings.max_load_ratio * (float(burden.sum()) + 1.0) / len(seen))
        bound = max(fair, self._settings.min_in_flight)
        # Distances are below 1, so candidates at the bound come after all others.
        places = fewest(distance + (burden >= bound), None)
        return Ranked(places, "hash" if places[0] == int(distance.argmin()) else "load")


def _distance(key: int, seen: Snapshot) -> Floats:
    """For rendezvous hashing: the distance of each candidate from a key, from 0 to 1. The nearest candidate
    owns the key.

    The distance is a pseudo-random number that depends only on the key and the name. So a candidate that
    comes or goes changes no other candidate's distance. The mixing is the finalizer of SplitMix64 (Steele,
    Lea, Flood, 2014).
    """
    mixed = seen.roster.names_hashed[seen.at] ^ np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64


def _some(weighed: Weighed, rng: random.Random) -> list[int]:
    """Return a random sample of the candidates."""
    candidates = range(len(weighed.seen))
    return rng.sample(candidates, min(MOST, len(candidates)))


RULES: Mapping[RuleName, Callable[[PolicySpec, random.Random], Rule]] = {
    "least-cost": LeastCost,
    "affinity": Affinity,
    "prefix-hash": PrefixHash,
    "session": Session,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "random": Random,
}
"""The rules by their names in the policy."""
