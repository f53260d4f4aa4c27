"""The `flow` part of the policy: who goes first, who waits and who is refused. Part of `epp.config.policy`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epp.config.strict import Strict

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Priority = Annotated[int, Meta(ge=-1000, le=1000)]
_PriorityText = Annotated[str, Meta(pattern="^(0|-?[1-9][0-9]{0,3})$")]
"""A key of a YAML map in an object of Kubernetes is a string."""


class Waiting(Strict, frozen=True):
    """How much may wait."""

    max_requests: Annotated[int, Meta(ge=0, le=10**6, description="Requests.")] = 10_000
    max_bytes: Annotated[int, Meta(ge=0, le=2**40, description="Bytes of the requests' bodies.")] = 2**28


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
            description="A request goes when its server is predicted to begin with it within this time. 0: learned, at once while nobody more "
            "pressing is expected, else within 0.1 s (docs/flow-control.md).",
        ),
    ] = 0.0
    order: Annotated[
        Literal["Arrival", "Deadline", "Shortest"],
        Meta(
            description="Which request of a tenant goes first. Shortest: the one with the least to compute; long ones age."
        ),
    ] = "Arrival"
    deadline_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="The longest time to the first token, for requests without `x-llm-d-slo-ttft-ms`; 0: no deadline.",
        ),
    ] = 0.0
    when_late: Annotated[
        Literal["Refuse", "Demote"],
        Meta(
            description="What becomes of a request that cannot meet its deadline: 429 at once, or the last place of its priority."
        ),
    ] = "Refuse"
    ttl_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="A request that has waited so long is refused.")
    ] = 30.0
    ttl_by_priority: Annotated[
        dict[_PriorityText, Annotated[float, Meta(gt=0, le=3600)]],
        Meta(max_length=16, description='The same for requests of one priority, such as `{"-10": 600}`.'),
    ] = {}
    in_all: Annotated[Waiting, Meta(description="Bounds of everything that waits.")] = Waiting()
    per_priority: Annotated[Waiting, Meta(description="Bounds of each priority.")] = Waiting()
    per_tenant: Annotated[Waiting, Meta(description="Bounds of each tenant, within a priority.")] = Waiting()
    objectives: Annotated[
        dict[_Name, _Priority],
        Meta(
            max_length=64,
            description="Priority by the value of `x-llm-d-inference-objective`, where no InferenceObjective has this name. The higher "
            "goes first.",
        ),
    ] = {}
    models: Annotated[
        dict[_Name, _Priority],
        Meta(max_length=64, description="Priority by model or adapter, where the header says none."),
    ] = {}
    paths: Annotated[
        dict[_Name, _Priority],
        Meta(
            max_length=64,
            description="Priority by the beginning of the request's path, where neither header nor model says one. The longest counts.",
        ),
    ] = {}
    claims: Annotated[
        tuple[Literal["Objective", "Tenant", "Deadline", "BodyPriority"], ...],
        Meta(
            max_length=4,
            description="What a request may say of itself: by the headers of objective, tenant and deadline, and by `priority` in the body "
            "(vLLM's: the lower goes first). What is not named here is not read.",
        ),
    ] = ("Objective", "Tenant", "Deadline")
    tenant_header: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9-]+$",
            max_length=64,
            description="Header that names the tenant. Clients must not be able to choose it freely.",
        ),
    ] = "x-llm-d-inference-fairness-id"
    max_tenants: Annotated[
        int, Meta(ge=1, le=10_000, description="Tenants of a priority beyond them share one queue.")
    ] = 256
    goal_seconds: Annotated[float, Meta(gt=0, le=3600, description="The wait at which saturation is 1.")] = (
        2.0
    )
