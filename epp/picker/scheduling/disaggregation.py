"""Decides whether the answering endpoint computes a prompt itself, or a prefill endpoint computes it and then
sends its KV cache (P/D).

The expression of the least-cost rule gives both prices, in seconds. The price of the prefill endpoint also
includes the transfer: the tokens that the answering endpoint lacks, times the bytes of a token, divided by
the bandwidth. A prefill-only endpoint writes no answers, so a prompt stalls no answers there. Pure; called by
`prefilling` after the rule has chosen the answering endpoint.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from epp.config.policy import PolicySpec
from epp.config.routing import Disaggregation
from epp.picker.scheduling.least_cost import cost_s
from epp.picker.scheduling.schedule import Choice, any_of, fewest, loading_s, over_limits, uncached_tokens
from epp.picker.scheduling.snapshot import Floats, SchedulingRequest, Snapshot


class ComputedElsewhere(NamedTuple):
    """The prefill endpoint that should compute a prompt, since that is faster."""

    place: int
    """The endpoint's place in the snapshot of prefill endpoints."""
    uncached_tokens: int
    transfer_s: float
    cost_s: float
    instead_of_s: float
    trial: bool
    """Whether this request is a trial: the endpoint's answers fail, and the trial shows whether they still
    do."""


def transfer_s(tokens: float, settings: Disaggregation) -> float:
    """Return the time from the decision until the decode endpoint has the KV cache of `tokens`, without the
    time to compute it.
    """
    return (
        settings.overhead_seconds + tokens * settings.kv_bytes_per_token / settings.transfer_bytes_per_second
    )


def computed_elsewhere(
    choice: Choice,
    answering: Snapshot,
    request: SchedulingRequest,
    prefilling: Snapshot,
    *,
    spec: PolicySpec,
    rng: random.Random,
) -> ComputedElsewhere | None:
    """Return the prefill endpoint that should compute the prompt for the first endpoint of `choice`, a
    place in `answering`. None: the first endpoint should compute the prompt itself.

    request: the request as prefill endpoints see it, with a cached part for each place in `prefilling`.
    """
    chosen = choice.places[0]
    lacking = float(choice.uncached_tokens[chosen])
    if lacking < spec.disaggregation.min_uncached_tokens:
        return None
    here_s = cost_s(
        float(answering.undone_tokens[chosen]),
        lacking,
        float(answering.in_flight[chosen]),
        float(answering.rate[chosen]),
        None,
        weight=spec.cost.uncached_token_weight,
        stall=spec.cost.stalled_request_weight,
    )
    moving_s = transfer_s(lacking, spec.disaggregation)
    uncached = uncached_tokens(request, spec.gain)
    there_s = _prices_s(uncached, prefilling, spec) + moving_s
    left_out = over_limits(spec.load, prefilling)
    if prefilling.failing is not None:
        left_out["failing"] = prefilling.failing
    if left_out:
        there_s = np.where(any_of(left_out), np.inf, there_s)
    place, trial = fewest(there_s, rng)[0], False
    if prefilling.trials:
        place, trial = prefilling.trials[0], True
        there_s = _prices_s(uncached, prefilling, spec) + moving_s
    price_s = float(there_s[place])
    if price_s >= here_s:
        return None
    return ComputedElsewhere(place, int(uncached[place]), moving_s, price_s, here_s, trial)


def _prices_s(uncached: Floats, prefilling: Snapshot, spec: PolicySpec) -> Floats:
    """Return the price of computing the prompt at each prefill endpoint. Its requests in flight are other
    prompts, unless the endpoint writes answers too.
    """
    answers = np.where(prefilling.roster.answers[prefilling.at], prefilling.in_flight, 0.0)
    price_s: Floats = cost_s(
        prefilling.undone_tokens,
        uncached,
        answers,
        prefilling.rate,
        loading_s(prefilling, load_s=spec.lora.load_seconds),
        weight=spec.cost.uncached_token_weight,
        stall=spec.cost.stalled_request_weight,
    )
    if prefilling.failure_share is not None:
        price_s = price_s + spec.failures.cost_seconds * prefilling.failure_share
    return price_s
