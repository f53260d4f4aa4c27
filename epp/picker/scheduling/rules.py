"""The routing rules by their names. Each puts the candidates in order, best first, and gives the reason of
the choice in one word.

A rule is one class and one line in `RULES`. Most rules are one expression over the columns of a snapshot.
Rules keep no references to endpoints between picks. Equal candidates are in random order, since a fixed order
would be a bias that strengthens itself. The default rule is in `least_cost`; `schedule` calls the rule of the
policy.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from math import ceil, inf
from typing import ClassVar

import numpy as np
from xxhash import xxh3_64_intdigest

from epp.config.policy import PolicySpec, RuleName
from epp.picker.scheduling.least_cost import LeastCost
from epp.picker.scheduling.schedule import MOST, Choice, Rule, Weighed, equals_apart, fewest
from epp.picker.scheduling.snapshot import Floats, SchedulingRequest, SentPick, Snapshot

_BUSY_TOKENS = 2_048
"""A server with more tokens to compute is left for the next match: about the tokens of one step."""


class Affinity(Rule):
    """The 0602 proposal's plain rule. It prefers servers that hold the adapter, then servers with a free slot
    for the adapter; among these the longest match; among equal matches the fewest tokens to compute, then the
    fewest requests. Servers that have too much to compute come after the others, so that there are no hot
    spots.
    """

    def rank(self, weighed: Weighed) -> Choice:
        seen, uncached = weighed.seen, weighed.uncached_tokens
        undone = seen.undone_tokens
        digits = [(undone > _BUSY_TOKENS, 1), (uncached, 22), (undone, 22), (seen.burden(), 15)]
        if seen.has_adapter is not None and seen.free_slot is not None:
            # Loading an adapter costs some thousand tokens, so its server may be busier.
            adapters = np.where(seen.has_adapter, 0, np.where(seen.free_slot, 1, 2))
            digits = [(undone > 8 * _BUSY_TOKENS, 1), (adapters, 2), *digits]
        key = np.zeros(len(seen), dtype=np.int64)
        for column, bits in digits:  # the digits of one number
            key = key * 2**bits + np.minimum(column.astype(np.int64), 2**bits - 1)
        places = equals_apart(fewest(key, self._rng), key, weighed)
        return Choice(
            weighed, places, "prefix" if uncached[places[0]] < weighed.request.prompt_tokens else "load"
        )


class RoundRobin(Rule):
    """Chooses each candidate in turn, in the order of names."""

    gated = False
    _last = ""

    def rank(self, weighed: Weighed) -> Choice:
        seen = weighed.seen
        names = seen.roster.by_name
        next_turn = bisect_right(names, self._last)
        places = fewest((seen.roster.turn[seen.at] - next_turn) % len(names), None)
        self._last = seen.roster.names[seen.slots[places[0]]]
        return Choice(weighed, places, "turn")


class Random(Rule):
    """Chooses by chance, each candidate with the same probability."""

    gated = False

    def rank(self, weighed: Weighed) -> Choice:
        candidates = range(len(weighed.seen))
        return Choice(weighed, self._rng.sample(candidates, min(MOST, len(candidates))), "chance")


class LeastLoad(Rule):
    """Chooses the candidate with the fewest requests in flight."""

    gated = False

    def rank(self, weighed: Weighed) -> Choice:
        return Choice(weighed, fewest(weighed.seen.burden(), self._rng), "load")


class PrefixHashRule(Rule):
    """Consistent hashing of the prompt's beginning, with bounded loads (Mirrokni et al., arXiv 1608.01350).

    Equal beginnings go to the same endpoint. Every picker computes this endpoint by itself, so nothing has to
    be remembered or shared. If the endpoint has its bound of requests, the next endpoint in the key's order
    gets the request. Prompts without a key go by load.
    """

    reason: ClassVar = "hash"

    def key(self, request: SchedulingRequest | SentPick) -> int:
        return request.beginning

    def _bound(self, burden: Floats) -> float:
        settings = self._spec.prefix_hash
        fair = ceil(settings.max_load_ratio * (float(burden.sum()) + 1.0) / len(burden))
        return max(fair, settings.min_in_flight)

    def rank(self, weighed: Weighed) -> Choice:
        seen, burden, key = weighed.seen, weighed.seen.burden(), self.key(weighed.request)
        if not key:
            return Choice(weighed, fewest(burden, self._rng), "load")
        distance = _distance(key, seen)
        # Distances are below 2, so candidates at the bound come after all others.
        places = fewest(distance + 2 * (burden >= self._bound(burden)), None)
        return Choice(weighed, places, self.reason if places[0] == int(distance.argmin()) else "load")


class Session(PrefixHashRule):
    """Rendezvous hashing of the session header: each session keeps its endpoint while the endpoint stays.

    Endpoints that come or go move only their own share of the sessions.
    """

    gated = False
    reason = "session"

    def key(self, request: SchedulingRequest | SentPick) -> int:
        return xxh3_64_intdigest(request.session.encode()) if request.session else 0

    def _bound(self, burden: Floats) -> float:
        return inf


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


RULES: Mapping[RuleName, Callable[[PolicySpec, random.Random], Rule]] = {
    "least-cost": LeastCost,
    "affinity": Affinity,
    "prefix-hash": PrefixHashRule,
    "session": Session,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "random": Random,
}
"""The rules by their names in the policy."""
