"""Makes one decision: takes a request and a snapshot of its candidates, and returns the best candidates and
the reason.

`Scheduler(spec, rule).schedule(request, snapshot)` is pure, except for the turns that a rule remembers and
the random numbers that it draws. It books nothing and sends nothing, so it may be called twice. The picker
calls it once for each request and commits the result. A policy in dry run is called with the same inputs.
Flow control may call it before it lets a request go.

The steps are the same for every rule: the gain threshold decides whether matches count, failing servers are
excluded, the load thresholds exclude more servers, and the rule ranks the others. This module knows a rule
only by what it gets (`Weighed`) and returns (`Choice`). Only this module says what unknown values mean: a NaN
is over no threshold.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial, reduce
from operator import or_
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from epp.base.errors import SaturatedError
from epp.base.types import EndpointName
from epp.config.policy import Gain, LoadSettings, PolicySpec
from epp.picker.scheduling.snapshot import (
    MOST_KEPT,
    Bools,
    Floats,
    Ints,
    SchedulingRequest,
    SentPick,
    Snapshot,
)

MOST: int = 10
"""Number of candidates that a rule puts in order: enough for every fallback list and for the decision's
record."""


class Weighed(Struct, frozen=True, eq=False, gc=False):
    """The input of a rule: one request and the candidates that may serve it."""

    seen: Snapshot
    request: SchedulingRequest
    uncached_tokens: Floats
    """U: prompt tokens that each candidate would have to compute.
    All tokens of the prompt, if a match saves too little to count."""
    load_s: Floats | None = None
    """Price of loading the request's adapter at each candidate; None: the request names no adapter."""

    def first_token_s(self, at: int | slice) -> Any:
        """Return the predicted time to the first token at these candidates: (B + U) / V + T."""
        each_s = (self.seen.undone_tokens[at] + self.uncached_tokens[at]) / self.seen.rate[at]
        if self.load_s is None or self.seen.free_slot is None:
            return each_s
        return each_s + self.load_s[at] / (2.0 - self.seen.free_slot[at])  # see `loading_s`

    def narrowed(self, places: Ints) -> Weighed:
        """Return the same request with only some of the candidates."""
        load_s = self.load_s[places] if self.load_s is not None else None
        request = replace(self.request, cached_tokens=self.request.cached_tokens[places])
        return Weighed(self.seen.narrowed(places), request, self.uncached_tokens[places], load_s)


class Choice(Struct, frozen=True, eq=False, gc=False):
    """The endpoints for a request, best first, and why. The rule makes it; `Scheduler` adds the excluded
    candidates.
    """

    weighed: Weighed
    places: list[int]
    """Places of the best candidates, the best first: `MOST` of them, or all if there are fewer."""
    reason: str
    """A short label: prefix, load, lora, hash, session, turn, chance, saturated, deadline, state, trial."""
    score_s: Floats | None = None
    """Predicted cost of every candidate in seconds. NaN: the candidate was excluded. None: the rule predicts
    no costs."""
    excluded: dict[str, Bools] = {}
    """The candidates that were not considered, by reason (failing, refusing, or the threshold)."""
    arrivals_per_s: float = 0.0
    """a: the requests that came to each server in a second lately, for rules that predict costs."""

    def why_excluded(self, place: int) -> str:
        """Return why a candidate was excluded. Empty: the candidate was considered."""
        return next((name for name, over in self.excluded.items() if over[place]), "")

    def only_ranked(self) -> Choice:
        """Return the choice among the candidates in `places` alone, in this order."""
        index = np.array(self.places)
        return Choice(
            self.weighed.narrowed(index),
            list(range(len(index))),
            self.reason,
            None if self.score_s is None else self.score_s[index],
            {name: over[index] for name, over in self.excluded.items()},
            self.arrivals_per_s,
        )


class Rule(ABC):
    """A routing rule: puts the candidates for one request in order."""

    gated: ClassVar[bool] = True
    """Whether the load thresholds narrow the candidates first. The plain rules do not use thresholds."""

    def __init__(self, spec: PolicySpec, rng: random.Random) -> None:
        self._spec, self._rng = spec, rng
        self._refused: dict[int, tuple[EndpointName, int, int]] = {}
        """By key: who did not compute its last requests, how many these are, and how many move the key. One
        client of several may be at fault: if the server computes the key again, it takes twice as many."""

    @abstractmethod
    def rank(self, weighed: Weighed) -> Choice:
        """Return the best candidates, best first, and the reason in one word. Nothing may be booked here:
        the caller may ask twice for one request.
        """

    def committed(self, sent: SentPick) -> None:  # noqa: B027 - most rules have no memory
        """Take in that a request was sent, by this rule or without one. Rules with a memory remember it."""

    def key(self, request: SchedulingRequest | SentPick) -> int:
        """Return what the next request of a refused client has in common with this one. 0: not known."""
        return request.prefix

    def ended(self, sent: SentPick, *, computed: bool) -> None:
        """Take in that a server has computed the prompt of a request, or that none will."""
        key = self.key(sent)
        server, in_a_row, most = self._refused.get(key, (sent.server, 0, 1))
        if key and not computed:
            self._refused[key] = sent.server, 1 + in_a_row * (server == sent.server), most
            if len(self._refused) > MOST_KEPT:
                del self._refused[next(iter(self._refused))]
        elif in_a_row and server == sent.server:  # a client was at fault
            self._refused[key] = server, 0, 2 * most if in_a_row >= most else most

    def refusing(self, request: SchedulingRequest, seen: Snapshot) -> Bools | None:
        """Return the candidate that has just refused what this request has in common with earlier ones."""
        server, in_a_row, most = self._refused.get(self.key(request), ("", 0, 1))
        if seen.no_token is None or in_a_row < most:
            return None
        its_place: Bools = np.array([seen.roster.names[slot] == server for slot in seen.slots])
        return seen.no_token & its_place


def over_limits(load: LoadSettings, snapshot: Snapshot) -> dict[str, Bools]:
    """Return the candidates over each load threshold. Thresholds that no candidate exceeds are missing.
    Unknown load exceeds no threshold.
    """
    found = {}
    if snapshot.most_waiting > load.max_waiting:
        found["waiting"] = snapshot.waiting > load.max_waiting
    if snapshot.most_kv_usage > load.max_kv_usage and load.max_kv_usage < 1:
        found["kv_usage"] = snapshot.kv_usage > load.max_kv_usage
    if load.max_undone_tokens:
        found["undone"] = snapshot.undone_tokens > load.max_undone_tokens
    return {name: over for name, over in found.items() if np.count_nonzero(over)} if found else found


def any_of(masks: Mapping[str, Bools]) -> Bools:
    """Return the candidates that are in at least one of the masks."""
    return reduce(or_, masks.values())


def uncached_tokens(request: SchedulingRequest, gain: Gain) -> Floats:
    """Return U of every candidate. If even the best match saves too little, no match counts."""
    cached = request.cached_tokens
    most = cached.item(cached.argmax())
    if most and most < max(gain.min_match_tokens, gain.min_match_ratio * request.prompt_tokens):
        return np.full(len(cached), float(request.prompt_tokens))
    return float(request.prompt_tokens) - cached  # numpy takes an `int` twice as slowly


def loading_s(seen: Snapshot, *, load_s: float) -> Floats | None:
    """Return the price of loading the request's adapter at each candidate: its time, or twice its time where
    another adapter has to be dropped, which will be loaded again.
    """
    if seen.has_adapter is None or seen.free_slot is None:
        return None
    return np.where(seen.has_adapter, 0.0, np.where(seen.free_slot, load_s, 2 * load_s))


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
    edge = np.partition(key, MOST - 1)[MOST - 1, ...]  # numpy takes an array twice as fast as a number
    less, equals = (key < edge).nonzero()[0], (key == edge).nonzero()[0]
    few = sorted([(key.item(place), chance(), place) for place in less.tolist()])
    return [place for _, _, place in few] + _some_of(equals, MOST - len(few), rng)


def equals_apart(places: list[int], key: Floats | Ints, weighed: Weighed) -> list[int]:
    """Return `places` in the order in which the caches lose least, as far as the first ones are equal by
    `key`. A chance among equals would fill one cache while others have room.
    """
    least, count = key[places[0]], 1
    while count < len(places) and key[places[count]] == least:
        count += 1
    return places if count == 1 else sorted(places[:count], key=partial(_loss, weighed)) + places[count:]


def _loss(weighed: Weighed, place: int) -> tuple[bool, bool, float]:
    """Return how much a cache loses by taking a prompt. A cache with room loses nothing, and one with more
    room is better. Of full caches, the one whose oldest content was last used longest ago is best. A server
    that refuses prompts always has room, so it comes last.
    """
    seen, request = weighed.seen, weighed.request
    no_token = seen.no_token is not None and bool(seen.no_token[place])
    cache = (request.caches or {}).get(seen.roster.names[seen.slots[place]])
    if cache is None:
        return no_token, False, 0.0
    room_bytes = cache.capacity_bytes - cache.used_bytes - cache.guessed_bytes - request.text_bytes
    if room_bytes >= 0 or cache.oldest is None:
        return no_token, False, -room_bytes
    return no_token, True, cache.oldest.at


def _some_of(places: Ints, count: int, rng: random.Random | None) -> list[int]:
    """Return so many of the places, each with the same probability and in random order; without `rng`, the
    first.
    """
    if rng is None:
        few: list[int] = places[:count].tolist()
        return few
    chance, size = rng.random, len(places)
    count = min(count, size)
    drawn: dict[int, None] = {}
    while len(drawn) < count:  # this takes a third of the time of `rng.sample`
        drawn[int(chance() * size)] = None
    return [places.item(n) for n in drawn]


def first_of(place: int, places: list[int]) -> list[int]:
    """Return the places with this one before all others."""
    return [place, *[each for each in places if each != place]][:MOST]


class Scheduler:
    """One policy's way to decide. See the module's docstring."""

    def __init__(self, spec: PolicySpec, rule: Rule) -> None:
        self._spec = spec
        self.rule = rule

    def schedule(self, request: SchedulingRequest, snapshot: Snapshot) -> Choice:
        """Return the best candidates, best first; those that were excluded come last.

        SaturatedError: every candidate is over a load threshold and the policy refuses requests then.
        """
        uncached = uncached_tokens(request, self._spec.gain)
        excluded, saturated = self._excluded(snapshot)
        refusing = self.rule.refusing(request, snapshot)
        if refusing is not None and not any_of(with_it := excluded | {"refusing": refusing}).all():
            excluded = with_it
        load_s = loading_s(snapshot, load_s=self._spec.lora.load_seconds)
        weighed = Weighed(snapshot, request, uncached, load_s)
        if excluded:
            ranked = self._rank_some(weighed, np.flatnonzero(~any_of(excluded)))
        else:
            ranked = self.rule.rank(weighed)
        places, reason = ranked.places, ranked.reason
        if saturated and self.rule.gated:
            reason = "saturated"
        if request.holder is not None:
            places, reason = first_of(request.holder, places), "state"
        elif snapshot.trials and weighed.first_token_s(snapshot.trials[0]) <= request.left_s:
            places, reason = first_of(snapshot.trials[0], places), "trial"
        elif request.left_s < np.inf and weighed.first_token_s(places[0]) > request.left_s:
            each_s = weighed.first_token_s(slice(None))
            if load_s is not None:  # no adapter is loaded only for a deadline
                each_s[load_s > load_s[places[0]]] = np.inf
            if excluded:
                each_s[any_of(excluded)] = np.inf
            places, reason = first_of(int(each_s.argmin()), places), "deadline"
        return Choice(weighed, places, reason, ranked.score_s, excluded, ranked.arrivals_per_s)

    def _excluded(self, snapshot: Snapshot) -> tuple[dict[str, Bools], bool]:
        """Return the candidates that are excluded, by reason, and whether all candidates that do not fail are
        over a load threshold. At least one candidate always remains.
        """
        load, over = self._spec.load, over_limits(self._spec.load, snapshot)
        failing: dict[str, Bools] = {"failing": snapshot.failing} if snapshot.failing is not None else {}
        if not over:
            return failing, False
        everything = failing | over
        if not any_of(everything).all():
            return (everything if self.rule.gated else failing), False
        if load.when_saturated == "Reject":
            raise SaturatedError(
                f"every model server is over its load limit; try again in {load.retry_after_seconds} s",
                retry_after_s=load.retry_after_seconds,
            )
        return failing, True

    def _rank_some(self, weighed: Weighed, light: Ints) -> Choice:
        """Rank the candidates in `light`.
        If there is room behind them, the others follow by load, and failing candidates come last.
        """
        seen = weighed.seen
        ranked = self.rule.rank(weighed.narrowed(light))
        places = light[ranked.places].tolist()
        if len(places) < MOST:
            heavy = np.setdiff1d(np.arange(len(seen)), light)
            fails = seen.failing[heavy] if seen.failing is not None else np.zeros(len(heavy))
            by_load = heavy[np.lexsort((seen.in_flight[heavy], fails))]
            places += by_load[: MOST - len(places)].tolist()
        score_s = None
        if ranked.score_s is not None:
            score_s = np.full(len(seen), np.nan)
            score_s[light] = ranked.score_s
        return Choice(weighed, places, ranked.reason, score_s, arrivals_per_s=ranked.arrivals_per_s)
