"""Chooses an endpoint for a request that the picker has no time to read: by load only, without scores.

Pure except for the random numbers. `picker` calls this module and books the choice.
"""

from __future__ import annotations

import random

from epp.picker.decision import PickRequest
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet


def choose_hurriedly(
    request: PickRequest, fleet: Fleet, rng: random.Random, *, most: int, now: float
) -> list[EndpointState]:
    """Return at most `most` destinations, the best first: the less loaded of two random endpoints comes
    first, whatever the rule and the prompt.
    """
    slots = fleet.candidates(request.inference.model, subset=request.subset)
    few = [fleet.in_slot(slot) for slot in rng.sample(slots, min(max(most, 2), len(slots)))]
    if len(few) > 1 and few[1].load(few[1].metrics) < few[0].load(few[0].metrics):
        few[0], few[1] = few[1], few[0]
    failures = fleet.failures
    if failures.marks:
        few.sort(key=lambda state: round(failures.share(state, now=now), 1))
    return few[:most]
