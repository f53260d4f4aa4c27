"""Between what is known of endpoints and what rules look at: views of the candidates, and the record shown to people.

Pure functions of one pick. Called by `picker`, and through `choosing` and `dry_run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

from epp.decision import Candidate, Decision, PickRequest, WouldPick
from epp.endpoints.state import EndpointState
from epp.policy import Gain, Policy, PolicySpec
from epp.scheduling.candidates import View
from epp.scheduling.rules import cost_parts_s
from epp.types import EndpointName

_SHOWN_CANDIDATES = 10
_SHOWN_CHARS = 256
"""Of a model's name: clients choose it, and decisions are kept."""


def cached_tokens(state: EndpointState, held_tokens: float, prompt_tokens: int) -> int:
    """Tokens that the server would take from its cache, holding so many of the prompt: whole blocks, never all.

    A server computes at least the last token, to have something to sample from.
    """
    tokens = min(int(held_tokens), prompt_tokens - 1)
    block = (state.metrics.block_size if state.metrics else None) or 1
    return max(0, tokens // block * block)


def views_of(
    states: Sequence[EndpointState],
    cached: Mapping[EndpointName, int],
    prompt_tokens: int,
    *,
    adapter: str,
    spec: PolicySpec,
    now: float,
) -> list[View]:
    """The candidates at this moment. cached: tokens of the prompt that an endpoint holds; most hold none and are left out.

    The one loop that every pick runs over every endpoint: it makes what it must, by position, and calls little.
    """
    stale_after_s = spec.scrape.stale_after_seconds
    views = []
    for state in states:
        endpoint, metrics, rate = state.endpoint, state.metrics, state.rate.tokens_per_s
        if metrics is not None and now - metrics.scraped_at > stale_after_s:  # `fresh`, written out
            metrics = None
        held = cached.get(endpoint.name, 0)
        views.append(
            View(
                endpoint.name,
                endpoint.address,
                held,
                held,
                prompt_tokens - held,
                state.backlog.undone_tokens(now=now, rate=rate),
                state.load(metrics),
                metrics.waiting if metrics else 0,
                metrics.kv_usage if metrics else 0.0,
                rate,
            )
        )
    if adapter:
        for state, view in zip(states, views, strict=True):
            view.has_adapter = state.has_adapter(adapter)
            view.free_slot = len(state.loaded_adapters()) < state.slots(spec=spec)
    return views


def apply_gain(views: Sequence[View], prompt_tokens: int, gain: Gain) -> None:
    """Where even the best match saves too little, the rule sees no matches at all."""
    matched = [v for v in views if v.matched_tokens]
    if not matched:
        return
    best = max(v.matched_tokens for v in matched)
    if best < max(gain.min_match_tokens, gain.min_match_ratio * prompt_tokens):
        for view in matched:
            view.matched_tokens = 0
            view.uncached_tokens = prompt_tokens


def decision_of(
    ordered: Sequence[View],
    *,
    request: PickRequest,
    prompt_tokens: int,
    prompt_chunks: int,
    adapter: str,
    policy: Policy,
    reason: str,
    would_pick: WouldPick | None,
    at_unix_s: float,
) -> Decision:
    """The record of a pick: the first of `ordered` was chosen."""
    inference, spec, chosen = request.inference, policy.spec, ordered[0]
    return Decision(
        request_id=request.request_id,
        at_unix_s=at_unix_s,
        kind=inference.kind,
        model=inference.model[:_SHOWN_CHARS],
        adapter=adapter,
        rule=spec.rule,
        policy=policy.metadata.name,
        prompt_tokens=prompt_tokens,
        prompt_chunks=prompt_chunks,
        matched_tokens=chosen.cached_tokens,
        reason=reason,
        chosen=chosen.name,
        destinations=tuple([v.address for v in ordered[: spec.max_destinations]]),
        candidates=Shown(ordered, spec=spec, adapter=adapter),
        unread=inference.unread,
        dry_run=would_pick,
    )


class Shown(Sequence[Candidate]):
    """The first candidates, made when somebody looks: of a thousand decisions, people read a few. The views must not change."""

    __slots__ = ("_adapter", "_made", "_spec", "_views")

    def __init__(self, views: Sequence[View], *, spec: PolicySpec, adapter: str) -> None:
        self._views = views[:_SHOWN_CANDIDATES]
        self._spec = spec
        self._adapter = adapter
        self._made: tuple[Candidate, ...] | None = None

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if self._made is None:
            self._made = tuple([self._candidate(view) for view in self._views])
        return self._made[index]

    def _candidate(self, v: View) -> Candidate:
        return Candidate(
            v.name,
            v.address,
            v.cached_tokens,
            v.uncached_tokens,
            int(v.backlog_tokens),
            v.in_flight,
            v.waiting,
            v.kv_usage,
            v.rate,
            v.score_s,
            cost_parts_s(v, spec=self._spec, adapter=self._adapter),
            v.excluded,
        )
