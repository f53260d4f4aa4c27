"""The default rule, `least-cost`, and its price: what a prompt costs at a server, in seconds.

The price is one expression, the same for one server's numbers and for columns of them. `disaggregation` uses
it for the price of a prefill elsewhere, and `candidates` for the parts that people see. `rules` has the
other rules.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np

from epp.config.policy import PolicySpec
from epp.config.routing import Cost
from epp.scheduling.demand import AT_ONCE_S
from epp.scheduling.schedule import MOST, Ranked, Weighed, fewest
from epp.scheduling.snapshot import Floats

_NEAR = 1.05
"""Costs are estimates, so a cost of at most this many times the least cost counts as equally good."""
_ALIKE = 0.1
"""Servers hold the same prefix if the longest match is longer by at most this share."""
_LOOKING_AT_ONE = 2.0
"""Expected number of picks that consider the same server before their pickers know of each other's picks."""
Numbers = Any
"""A column, or one number. Compiled code has no type for both, since it accepts only a float where the type
says `float`.
"""


def cost_s(
    undone_tokens: Numbers,
    uncached_tokens: Numbers,
    in_flight: Numbers,
    rate: Numbers,
    load_s: Numbers | None = None,
    *,
    weight: Numbers = 0.0,
    stall: Numbers = 0.0,
    running_tokens: Numbers = 0.0,
) -> Numbers:
    """Return the cost by the least-cost rule: (B + c L) / V + (U / V + T) (w + k L). Takes columns or
    numbers.

    The prefill of a prompt, and the loading of an adapter (T), delay the request itself and the requests that
    wait behind it (w). They also stall the answers that the server is writing (k for each request in flight).
    """
    own_s = uncached_tokens / rate
    if load_s is not None:
        own_s = own_s + load_s
    return (undone_tokens + running_tokens * in_flight) / rate + own_s * (weight + stall * in_flight)


def cost_parts_s(
    undone_tokens: float,
    uncached_tokens: float,
    in_flight: float,
    rate: float,
    load_s: float | None,
    *,
    cost: Cost,
) -> dict[str, float]:
    """Return the parts that add up to one candidate's `cost_s`. Each part is the same expression with only
    one cause of cost left in.
    """
    weight, stall, running = (
        cost.uncached_token_weight,
        cost.stalled_request_weight,
        cost.running_request_tokens,
    )
    return {
        "backlog": cost_s(undone_tokens, 0.0, in_flight, rate),
        "prefill": cost_s(0.0, uncached_tokens, in_flight, rate, weight=weight),
        "stall": cost_s(0.0, uncached_tokens, in_flight, rate, load_s, stall=stall),
        "in_flight": cost_s(0.0, 0.0, in_flight, rate, running_tokens=running),
        "lora": cost_s(0.0, 0.0, in_flight, rate, load_s, weight=weight),
    }


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
        """Return the best candidates. Of those with nearly the least cost, the one with the fewest tokens to
        compute comes first.

        least: the smallest value in `uncached`; None: no candidate holds a part of the prompt.
        """
        places = fewest(score_s, self._rng)
        first = places[0]
        if least is None or uncached[first] <= least:
            return places
        near = np.flatnonzero(score_s <= _NEAR * score_s[first])
        holder = int(near[np.lexsort((score_s[near], uncached[near]))[0]])
        if uncached[holder] == uncached[first]:
            return places
        return [holder, *[place for place in places if place != holder]][:MOST]

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
