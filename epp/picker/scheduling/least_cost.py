"""The default rule, `least-cost`: its price, which is the cost of a prompt at a server in seconds, and its
memory of the picker's own requests.

The price is one expression over columns. `prefilling` uses it for the price of a prefill elsewhere, and
`candidates` shows its parts.

The memory shows what to expect of later requests: `Demand` knows when each prefix was last asked for, and how
many requests come. A request counts from the moment in which it is booked, until a server refuses it. The
number of prefixes, and of requests of each prefix, is bounded. `rules` has the other rules.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from typing import TypeVar

import numpy as np
from msgspec import Struct

from epp.config.policy import PolicySpec
from epp.picker.scheduling.schedule import Choice, Rule, Weighed, equals_apart, fewest, first_of
from epp.picker.scheduling.snapshot import MOST_KEPT, Floats, SentPick

_ALIKE = 0.1
"""Servers hold the same prefix if the longest match is longer by at most this share."""
_LOOKING_AT_ONE = 2.0
"""Expected number of picks that consider the same server before their pickers know of each other's picks."""
_MOST_REQUESTS = 32
"""The most requests that count for one prefix. If this many more are expected, the price of a copy is nearly
nothing.
"""

_INSTANT_S = 0.05
"""Requests that came within this time came together: a client that sends eight prompts at once, or over some
tens of milliseconds, will not send eight more, so they are no demand.
"""

_TWICE_AS_LONG = 65_536
"""A token behind so many tokens takes twice as long as the first one of a prompt. Attention takes as many
operations as all else at 30,000 tokens in an 8B model, and at 53,000 in a 70B model.
"""

_JOIN_S = 0.5
"""Later requests go to other servers if a queue is longer than this."""
_LATELY_S = 20.0
"""How many requests come is counted over this time."""

N = TypeVar("N", float, Floats)
"""One number, or a column of them."""


def prefill_s(uncached_tokens: N, prompt_tokens: int, rate: N) -> N:
    """Return the time of a prefill: U / V, but tokens late in the prompt count more, since their attention
    reads all before them.
    """
    # They stand at `prompt_tokens - uncached_tokens / 2` in the mean.
    late = 1 + prompt_tokens / _TWICE_AS_LONG - uncached_tokens * (0.5 / _TWICE_AS_LONG)
    return uncached_tokens * late / rate


def delayed(wait_s: N, in_flight: N, *, stall: N | float, arrivals_per_s: float) -> N:
    """Return the seconds that others lose by a second of prefill: k L + a min(B / V, 0.5 s).

    The prefill stalls the answers that the server is writing (k for each request in flight), and delays the
    requests that will come while this one waits (a in each second).
    """
    joined_s: N = np.minimum(wait_s, _JOIN_S)
    return stall * in_flight + arrivals_per_s * joined_s


def prices_s(
    weighed: Weighed, paid_tokens: Floats, spec: PolicySpec, *, arrivals_per_s: float = 0.0
) -> Floats:
    """Return the cost at each candidate: B / V + (U / V + T) (w + k L + a min(B / V, 0.5 s)), and more if its
    answers fail.

    B / V is the wait. U / V + T, the prefill of the prompt and the loading of its adapter, delay the request
    itself (w) and others (`delayed`). paid_tokens: U.
    """
    seen, cost = weighed.seen, spec.cost
    wait_s = seen.undone_tokens / seen.rate
    own_s = prefill_s(paid_tokens, weighed.request.prompt_tokens, seen.rate)
    if weighed.load_s is not None:
        own_s = own_s + weighed.load_s
    stall = cost.stalled_request_weight
    others_s = delayed(wait_s, seen.in_flight, stall=stall, arrivals_per_s=arrivals_per_s)
    price_s: Floats = wait_s + own_s * (cost.uncached_token_weight + others_s)
    if seen.failure_share is not None:
        price_s = price_s + spec.failures.cost_seconds * seen.failure_share
    return price_s


class LeastCost(Rule):
    """Chooses the least predicted cost in seconds (`prices_s`)."""

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        super().__init__(spec, rng)
        self.demand = Demand()
        """When each prefix was last asked for."""

    def committed(self, sent: SentPick) -> None:
        self.demand.asked(sent.prefix, now=sent.at)

    def ended(self, sent: SentPick, *, computed: bool) -> None:
        super().ended(sent, computed=computed)
        self.demand.ended(sent.prefix, at=sent.at, computed=computed)

    def rank(self, weighed: Weighed) -> Choice:
        seen, uncached = weighed.seen, weighed.uncached_tokens
        arrivals_per_s = self.demand.per_s(now=weighed.request.at) / len(uncached)
        paid = _paid_tokens(weighed, self.demand)
        score_s = prices_s(weighed, paid, self._spec, arrivals_per_s=arrivals_per_s)
        places = equals_apart(fewest(score_s, self._rng), score_s, weighed)
        if seen.unreported_picks > _LOOKING_AT_ONE:
            counting_s = self._of_few(score_s, weighed, places[0])
            places = first_of(fewest(counting_s, self._rng)[0], places)
        first = places[0]
        if uncached[first] < weighed.request.prompt_tokens:
            reason = "prefix"
        else:
            reason = "lora" if seen.has_adapter is not None and seen.has_adapter[first] else "load"
        return Choice(weighed, places, reason, score_s, arrivals_per_s=arrivals_per_s)

    def _of_few(self, score_s: Floats, weighed: Weighed, first: int) -> Floats:
        """Return the scores when other pickers have sent many requests that this picker does not know of yet.
        Infinite: the candidate does not count.

        Otherwise all pickers would send these requests to the server that seems best to all of them. Also,
        the best of very many stale numbers seems better than it is, so a server that holds the prompt would
        lose it to that server. Therefore only a few of the candidates that hold least of the prompt count.
        They are drawn by chance, so that about two of the unknown requests consider the same server. The
        candidates that hold most of the prompt are drawn in the same way.
        """
        seen, uncached, load_s = weighed.seen, weighed.uncached_tokens, weighed.load_s
        few = max(2, int(_LOOKING_AT_ONE * len(uncached) / seen.unreported_picks))
        # A candidate must not be drawn if it is worse even when the best one gets all of these requests.
        unreported_s = seen.unreported_picks * weighed.request.prompt_tokens / seen.rate[first]
        fair = score_s <= score_s[first] + unreported_s
        if load_s is not None:
            fair &= load_s == load_s[first]
        near = _ALIKE * weighed.request.prompt_tokens
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


def _paid_tokens(weighed: Weighed, demand: Demand) -> Floats:
    """Return the tokens that this request pays at each candidate: U, but of a further copy of the longest
    match only its share.

    While this request waits at a holder, about as many requests for this prefix will come as came in an equal
    time before. If they are more than the holders' even part of all requests, the excess shares the copy.
    Each gains about half of what this request saves, since one more server then shares the holders' queues.
    """
    seen, request = weighed.seen, weighed.request
    paid = uncached = weighed.uncached_tokens
    if request.prefix in demand:
        least = uncached[uncached.argmin()]  # a third of the time of `min`
        held = uncached <= least + _ALIKE * (request.prompt_tokens - least)
        holders, servers = np.count_nonzero(held), len(held)
        if holders < servers:
            wait_s = float((seen.undone_tokens[held] / seen.rate[held]).min())
            count, of_all = demand.between(request.prefix, request.at - wait_s, request.at - _INSTANT_S)
            paid = least + (uncached - least) / max(1.0, 1 + (count - of_all * holders / servers) / 2)
    return paid


class _Last(Struct, eq=False, gc=False):
    """The last requests for one prefix."""

    times: list[float]
    """When they came, in order."""
    open: int = 0
    """The number of requests that no server has computed or refused yet."""


class Demand:
    """Remembers when each prefix was last asked for, so that the rule can predict whether a further copy of
    the prefix will be used, and when the last requests came, so that it can predict how many will come.

    A prefix is known here by the hash of the last chunk that any server held when a request came. A request
    counts from the moment at which it comes, but only a request that was served makes others forgotten. The
    prefix that was served longest ago is removed first.
    """

    __slots__ = ("_by_prefix", "_times")

    def __init__(self) -> None:
        self._times: list[float] = []
        """When the last requests for any prefix came, in order."""
        self._by_prefix: OrderedDict[int, _Last] = OrderedDict()

    def asked(self, prefix: int, *, now: float) -> None:
        """Called when a request was booked. prefix: 0 if no server held a part of the prompt."""
        self._times.append(now)
        if prefix:
            last = self._by_prefix.setdefault(prefix, _Last([]))
            last.times.append(now)
            last.open += 1

    def ended(self, prefix: int, *, at: float, computed: bool) -> None:
        """Called when a server has computed a request that was booked at `at`, or when it is known that none
        will. Such a request is forgotten.
        """
        if not computed:
            _remove(self._times, at)
        elif len(self._times) > 8 * MOST_KEPT:
            del self._times[: 4 * MOST_KEPT]
        last = self._by_prefix.get(prefix)
        if last is None:
            return
        last.open = max(0, last.open - 1)  # it may have been forgotten meanwhile, and asked for again
        if computed:
            del last.times[: max(0, len(last.times) - last.open - _MOST_REQUESTS)]
            self._by_prefix.move_to_end(prefix)
            if len(self._by_prefix) > MOST_KEPT:
                self._by_prefix.popitem(last=False)
            return
        _remove(last.times, at)
        if not last.times:
            del self._by_prefix[prefix]

    def per_s(self, *, now: float) -> float:
        """Return how many requests came in a second lately."""
        first = bisect_left(self._times, now - _LATELY_S)
        count = len(self._times) - first
        return count / max(2.0, now - self._times[first]) if count else 0.0

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._by_prefix

    def between(self, prefix: int, first_at: float, end_at: float) -> tuple[int, int]:
        """Return two numbers: the requests for this prefix that came from the first time until the second, of
        the last ones, and all requests, for any prefix, from the first of these on.
        """
        times = self._by_prefix[prefix].times
        end = bisect_left(times, end_at)
        first = max(bisect_left(times, first_at), end - _MOST_REQUESTS)
        if first >= end:
            return 0, 0
        return end - first, bisect_left(self._times, end_at) - bisect_left(self._times, times[first])


def _remove(times: list[float], at: float) -> None:
    place = bisect_left(times, at)
    if place < len(times) and times[place] == at:
        del times[place]
