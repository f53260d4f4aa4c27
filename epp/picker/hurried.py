"""Chooses an endpoint for a request that the picker has no time to read: by load only, without scores.

Pure except for the random numbers. `picker` calls this module and books the choice.
"""

from __future__ import annotations

import random

from epp.config.policy import Policy
from epp.picker.decision import SHOWN_CHARS, Decision, PickRequest
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from epp.picker.server_caches import Prompt, ServerCaches


def choose_hurriedly(
    request: PickRequest,
    fleet: Fleet,
    caches: ServerCaches,
    rng: random.Random,
    *,
    policy: Policy,
    at_unix_s: float,
    now: float,
) -> tuple[EndpointState, Decision, Prompt]:
    """Return the less loaded of two random endpoints, whatever the rule and the prompt."""
    inference, spec = request.inference, policy.spec
    adapter = fleet.adapter(inference.model)
    slots = fleet.candidates(inference.model, subset=request.subset)
    failures, most = fleet.failures, min(spec.max_destinations, request.max_destinations)
    few = [fleet.in_slot(slot) for slot in rng.sample(slots, min(max(most, 2), len(slots)))]
    if len(few) > 1 and few[1].load(few[1].metrics) < few[0].load(few[0].metrics):
        few[0], few[1] = few[1], few[0]
    if failures.marks:
        few.sort(key=lambda state: round(failures.share(state, now=now), 1))
    state = few[0]
    prompt = caches.prompt(inference, base_model=state.model, body_bytes=request.body_bytes)
    decision = Decision(
        request_id=request.request_id,
        at_unix_s=at_unix_s,
        kind=inference.kind,
        model=inference.model[:SHOWN_CHARS],
        adapter=adapter,
        rule=spec.rule,
        policy=policy.metadata.name,
        prompt_tokens=prompt.tokens,
        prompt_chunks=0,
        matched_tokens=0,
        reason="overload",
        chosen=state.endpoint.name,
        destinations=tuple([each.endpoint.destination for each in few[:most]]),
        candidates=(),
        unread=inference.unread,
    )
    return state, decision, prompt
