"""What a rule may know about an endpoint at pick time, and the gate that narrows the choice before a rule decides.

The gate is the load thresholds'. (The gain threshold is applied to the matches before, by `choosing`; adapters are a matter of the
rules: a gate that keeps an adapter's requests where it is loaded fills one server while others idle.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import Struct

from epp.policy import PolicySpec
from epp.types import Address, EndpointName


class View(Struct, eq=False):
    """One endpoint at one pick. Tokens are estimates; waiting and kv_usage are 0 where metrics are stale: unknown is no load."""

    name: EndpointName
    address: Address
    cached_tokens: int
    """Prompt tokens that it holds, by our table."""
    matched_tokens: int
    """The same as far as the rule may count it: 0 where the gain is too small."""
    uncached_tokens: int
    """U: prompt tokens that this endpoint would have to compute."""
    backlog_tokens: float
    """B: tokens booked there and not yet computed."""
    in_flight: int
    """L: requests running or waiting there."""
    waiting: int
    kv_usage: float
    rate: float
    """V: tokens it computes in a second."""
    has_adapter: bool = False
    free_slot: bool = False
    """It can take one more adapter without dropping one."""
    score_s: float = 0.0
    excluded: str = ""


class Gated(Struct, frozen=True):
    """Outcome of the gate."""

    views: Sequence[View]
    saturated: bool
    """Every endpoint is over a load threshold; all are in `views` then."""


def over_threshold(view: View, spec: PolicySpec) -> str:
    """Name of the first load threshold that the endpoint is over, or the empty string."""
    load = spec.load
    if view.waiting > load.max_waiting:
        return "waiting"
    if view.kv_usage > load.max_kv_usage:
        return "kv_usage"
    if 0 < load.max_undone_tokens < view.backlog_tokens:
        return "undone"
    return ""


def gate(views: Sequence[View], *, spec: PolicySpec) -> Gated:
    """Leave out endpoints over a load threshold; `View.excluded` says why. Never leaves nothing."""
    load = spec.load
    max_undone_tokens = load.max_undone_tokens or inf
    light = [
        v
        for v in views
        if v.waiting <= load.max_waiting
        and v.kv_usage <= load.max_kv_usage
        and v.backlog_tokens <= max_undone_tokens
    ]
    if len(light) == len(views):
        return Gated(views=views, saturated=False)
    if not light:
        return Gated(views=views, saturated=True)
    for view in views:
        view.excluded = over_threshold(view, spec)
    return Gated(views=light, saturated=False)
