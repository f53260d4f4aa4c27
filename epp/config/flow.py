"""The `flow` part of the policy: who goes first, who waits and who is refused.
Part of `epp.config.policy`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epp.config.strict import Strict

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Priority = Annotated[int, Meta(ge=-1000, le=1000)]
_PriorityText = Annotated[str, Meta(pattern="^(0|-?[1-9][0-9]{0,3})$")]
"""A priority as text, because the keys of a map in a Kubernetes object are strings."""


class Waiting(Strict, frozen=True):
    """How much may wait."""

    max_requests: Annotated[int, Meta(ge=0, le=10**6, description="Most requests that may wait.")] = 10_000
    max_bytes: Annotated[int, Meta(ge=0, le=2**40, description="Most bytes of bodies that may wait.")] = 2**28


class Flow(Strict, frozen=True):
    """Which requests go at once, which wait at the gateway, and which are refused. docs/flow-control.md."""

    mode: Annotated[
        Literal["Direct", "Hold"],
        Meta(
            description="Direct: every request is sent at once. Hold: a request that would wait at its server waits at the gateway."
        ),
    ] = "Direct"
    headroom_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="A request is sent when its server is predicted to begin with it within this time. "
            "0 means learned: sent at once while no more urgent request is expected, otherwise 0.1 s "
            "(docs/flow-control.md).",
        ),
    ] = 0.0
    order: Annotated[
        Literal["Arrival", "Deadline", "Shortest"],
        Meta(
            description="Which request of a tenant goes first. Arrival: the one that came first. Deadline: the one "
            "whose deadline is nearest. Shortest: the one with the fewest tokens to compute; a request that waits "
            "moves forward, so that long ones do not starve."
        ),
    ] = "Arrival"
    deadline_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Deadline of the first token, for requests without the header `x-llm-d-slo-ttft-ms`. "
            "0 means no deadline.",
        ),
    ] = 0.0
    when_late: Annotated[
        Literal["Refuse", "Demote"],
        Meta(
            description="What to do with a request that cannot meet its deadline. Refuse: answer 429 at once. "
            "Demote: put it last within its priority."
        ),
    ] = "Refuse"
    ttl_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="A request that has waited for this long is refused.")
    ] = 30.0
    ttl_by_priority: Annotated[
        dict[_PriorityText, Annotated[float, Meta(gt=0, le=3600)]],
        Meta(max_length=16, description='`ttlSeconds` for requests of one priority, such as `{"-10": 600}`.'),
    ] = {}
    in_all: Annotated[Waiting, Meta(description="Bounds of everything that waits.")] = Waiting()
    per_priority: Annotated[Waiting, Meta(description="Bounds of each priority.")] = Waiting()
    per_tenant: Annotated[Waiting, Meta(description="Bounds of each tenant, within a priority.")] = Waiting()
    objectives: Annotated[
        dict[_Name, _Priority],
        Meta(
            max_length=64,
            description="Priority by the value of the header `x-llm-d-inference-objective`, if no InferenceObjective has "
            "this name. The higher priority goes first.",
        ),
    ] = {}
    models: Annotated[
        dict[_Name, _Priority],
        Meta(max_length=64, description="Priority by model or adapter, if the header gives none."),
    ] = {}
    paths: Annotated[
        dict[_Name, _Priority],
        Meta(
            max_length=64,
            description="Priority by the beginning of the request's path, if neither header nor model gives one. The longest "
            "matching beginning counts.",
        ),
    ] = {}
    claims: Annotated[
        tuple[Literal["Objective", "Tenant", "Deadline", "BodyPriority"], ...],
        Meta(
            max_length=4,
            description="What the picker believes of a request: the headers with its objective, tenant and deadline, and "
            "`priority` in the body (as vLLM has it: the lower goes first). The picker ignores what is not listed here.",
        ),
    ] = ("Objective", "Tenant", "Deadline")
    tenant_header: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]+$",
            max_length=64,
            description="Header with the name of the tenant. Clients must not be able to choose it freely.",
        ),
    ] = "x-llm-d-inference-fairness-id"
    max_tenants: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Most tenants of a priority that have a queue of their own. Further tenants share one.",
        ),
    ] = 256
    goal_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Predicted wait at which the saturation is 1.")
    ] = 2.0
