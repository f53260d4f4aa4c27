"""What a prompt costs at a server, in seconds: the expression of the least-cost rule and its parts.

Pure, and the same for one server's numbers and for columns of them. Called by the least-cost rule, by
`disaggregation` for the price of a prefill elsewhere, and by `record` for the parts that people see.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from epp.config.routing import Cost
from epp.scheduling.snapshot import Floats, Snapshot

_DISPLACING = 2.0
"""Loads that count if no slot is free: the adapter's own, and the next load of the adapter that it
displaces."""
Numbers = Any
"""A column, or one number. Compiled code has no type for both, since it accepts only a float where the type
says `float`.
"""


def loading_s(seen: Snapshot, *, load_s: float) -> Floats | None:
    """Return the time that loading the request's adapter costs each candidate.

    If another adapter has to be dropped, the cost of loading that adapter again counts too.
    """
    if seen.has_adapter is None or seen.free_slot is None:
        return None
    return np.where(seen.has_adapter, 0.0, np.where(seen.free_slot, load_s, _DISPLACING * load_s))


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
