"""Makes the record of a decision that people see, from the inputs of the decision. Called by `picker` after
each choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any, overload

import numpy as np

from epp.config.policy import Policy, PolicySpec
from epp.decision import Candidate, Decision, PickRequest, WouldPick
from epp.scheduling.least_cost import cost_parts_s
from epp.scheduling.schedule import MOST, Choice, excluded
from epp.scheduling.snapshot import Floats, SchedulingRequest, Snapshot
from epp.types import Endpoint

_SHOWN_CHARS = 256
"""Longest part of a model's name that is kept: clients choose the name, and decisions stay in memory."""


def decision_of(
    choice: Choice,
    snapshot: Snapshot,
    asked: SchedulingRequest,
    *,
    request: PickRequest,
    prompt_chunks: int,
    adapter: str,
    policy: Policy,
    would_pick: WouldPick | None,
    at_unix_s: float,
) -> Decision:
    """Return the record of a pick. The first of `choice.places` gets the request."""
    inference, spec, places = request.inference, policy.spec, choice.places
    most = min(spec.max_destinations, request.max_destinations)
    chosen, roster, slots = places[0], snapshot.roster, snapshot.slots
    return Decision(
        request_id=request.request_id,
        at_unix_s=at_unix_s,
        kind=inference.kind,
        model=inference.model[:_SHOWN_CHARS],
        adapter=adapter,
        rule=spec.rule,
        policy=policy.metadata.name,
        prompt_tokens=asked.prompt_tokens,
        prompt_chunks=prompt_chunks,
        matched_tokens=int(asked.cached_tokens.item(chosen)),
        reason=choice.reason,
        chosen=roster.names[slots[chosen]],
        destinations=tuple([roster.addresses[slots[place]] for place in places[:most]]),
        candidates=Shown(choice, snapshot, asked, spec=spec),
        unread=inference.unread,
        dry_run=would_pick,
    )


def hurried_decision(
    request: PickRequest,
    endpoints: Sequence[Endpoint],
    *,
    prompt_tokens: int,
    adapter: str,
    policy: Policy,
    at_unix_s: float,
) -> Decision:
    """Return the record of a choice by load alone. The first of `endpoints` gets the request; no scores."""
    inference = request.inference
    return Decision(
        request_id=request.request_id,
        at_unix_s=at_unix_s,
        kind=inference.kind,
        model=inference.model[:_SHOWN_CHARS],
        adapter=adapter,
        rule=policy.spec.rule,
        policy=policy.metadata.name,
        prompt_tokens=prompt_tokens,
        prompt_chunks=0,
        matched_tokens=0,
        reason="overload",
        chosen=endpoints[0].name,
        destinations=tuple([endpoint.destination for endpoint in endpoints]),
        candidates=(),
        unread=inference.unread,
    )


_LEAST_SPARED_S = 1e-9
"""A smaller difference between the parts and the score is rounding. A larger one is the discount of the rule
on the stall price of a further copy of a prefix.
"""


class Shown(Sequence[Candidate]):
    """The best candidates. They are formatted only when somebody reads the decision, since people read few
    decisions.

    If there are many candidates, only the numbers of those that are shown are kept until then.
    """

    __slots__ = (
        "_left_out",
        "_made",
        "_numbers",
        "_places",
        "_roster",
        "_slots",
        "_spec",
        "best_cached_tokens",
    )

    def __init__(
        self, choice: Choice, snapshot: Snapshot, asked: SchedulingRequest, *, spec: PolicySpec
    ) -> None:
        cached = asked.cached_tokens
        self.best_cached_tokens = int(cached.item(cached.argmax()))
        """The most tokens of the prompt that any candidate held, whether it is shown or not."""
        self._places = choice.places
        self._slots = snapshot.slots
        self._left_out = choice.left_out
        self._numbers: tuple[Floats | None, ...] = (
            cached,
            choice.uncached_tokens,
            snapshot.undone_tokens,
            snapshot.in_flight,
            snapshot.waiting,
            snapshot.kv_usage,
            snapshot.rate,
            choice.score_s,
            choice.load_s,
            snapshot.failure_share,
        )
        if len(self._slots) > MOST:
            index = np.array(self._places)
            self._numbers = tuple([None if column is None else column[index] for column in self._numbers])
            self._left_out = {name: over[index] for name, over in self._left_out.items()}
            self._slots = [self._slots[place] for place in self._places]
            self._places = list(range(len(self._slots)))
        self._roster = snapshot.roster
        self._spec = spec
        self._made: tuple[Candidate, ...] | None = None

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if self._made is None:
            self._made = tuple([self._candidate(place) for place in self._places])
        return self._made[index]

    def _candidate(self, place: int) -> Candidate:
        numbers: list[Any] = [
            column[place].item() if column is not None else None for column in self._numbers
        ]
        cached, uncached, undone, in_flight, waiting, kv_usage, rate, score_s, load_s, share = numbers
        parts_s = cost_parts_s(undone, uncached, in_flight, rate, load_s, cost=self._spec.cost)
        parts_s["failing"] = self._spec.failures.cost_seconds * (share or 0.0)
        spared_s = 0.0 if score_s is None or isnan(score_s) else sum(parts_s.values()) - score_s
        if spared_s > _LEAST_SPARED_S:
            parts_s["stall"] -= spared_s
        slot = self._slots[place]
        return Candidate(
            name=self._roster.names[slot],
            address=self._roster.addresses[slot],
            matched_tokens=int(cached),
            uncached_tokens=int(uncached),
            backlog_tokens=int(undone),
            in_flight=int(in_flight),
            waiting=None if isnan(waiting) else int(waiting),
            kv_usage=None if isnan(kv_usage) else kv_usage,
            prefill_tokens_per_s=rate,
            score_s=0.0 if score_s is None or isnan(score_s) else score_s,
            parts_s=parts_s,
            excluded=excluded(self._left_out, place),
        )
