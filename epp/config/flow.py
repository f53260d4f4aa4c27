"""Defines the `flow` part of `epp.config.policy`: who goes first, who waits, who is refused."""

from typing import Annotated, Literal

from msgspec import Meta

from epp.config.reading import Strict

_FlowName = Annotated[str, Meta(min_length=1, max_length=256)]
_Priority = Annotated[int, Meta(ge=-1000, le=1000)]
_PriorityText = Annotated[str, Meta(pattern="^(0|-?[1-9][0-9]{0,3})$")]
"""A priority as text, because the keys of a map in a Kubernetes object are strings."""


class WaitingSettings(Strict, frozen=True):
    """Bounds of waiting requests."""

    max_requests: Annotated[int, Meta(ge=0, le=10**6)] = 10_000
    """The largest number of requests that may wait."""
    max_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**28
    """The largest size of all waiting bodies together, in bytes."""


class Flow(Strict, frozen=True):
    """Decides which requests go at once, which wait at the gateway, and which are refused
    (docs/flow-control.md).
    """

    mode: Literal["Direct", "Hold"] = "Direct"
    """Direct: every request is sent at once. Hold: a request that would wait at its server waits at the
    gateway."""
    wait_for_server_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """How long a request waits, in either mode, while no server of its model is ready, as in a pool that was
    scaled to zero. 0: it waits only while a pod is starting, for at most `ttlSeconds`, else it gets 503 at
    once."""
    order: Literal["Arrival", "Shortest"] = "Arrival"
    """Which request of a tenant goes first. Arrival: the one that came first. Shortest: the one with the
    fewest tokens to compute; a request that waits moves forward, so that long ones do not starve."""
    deadline_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Deadline of the first token, for requests without the header `x-llm-d-slo-ttft-ms`. A request that
    cannot meet its deadline gets 429. 0 means no deadline."""
    ttl_seconds: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """A request that has waited for this long is refused."""
    ttl_by_priority: Annotated[
        dict[_PriorityText, Annotated[float, Meta(gt=0, le=3600)]], Meta(max_length=16)
    ] = {}
    """`ttlSeconds` for requests of one priority, such as `{"-10": 600}`."""
    in_all: WaitingSettings = WaitingSettings()
    """Bounds of all requests that wait at one picker."""
    per_tenant: WaitingSettings = WaitingSettings()
    """Bounds of the waiting requests of each tenant, within a priority."""
    objectives: Annotated[dict[_FlowName, _Priority], Meta(max_length=64)] = {}
    """Priority by the value of the header `x-llm-d-inference-objective`, if no InferenceObjective has this
    name. The higher priority goes first."""
    models: Annotated[dict[_FlowName, _Priority], Meta(max_length=64)] = {}
    """Priority by model or adapter, if the header gives none."""
    claims: Annotated[tuple[Literal["Objective", "Tenant", "Deadline"], ...], Meta(max_length=4)] = (
        "Objective",
        "Tenant",
        "Deadline",
    )
    """The headers of a request that the picker obeys: its objective, tenant and deadline. The picker ignores
    the headers that are not listed here."""
    tenant_header: Annotated[str, Meta(pattern="^[a-z0-9-]+$", max_length=64)] = (
        "x-llm-d-inference-fairness-id"
    )
    """Header with the name of the tenant. Clients must not be able to choose it freely."""
    max_tenants: Annotated[int, Meta(ge=1, le=10_000)] = 256
    """The largest number of tenants of a priority that have a queue of their own. Further tenants share a
    queue.
    """
    goal_seconds: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    """Predicted wait at which the saturation is 1."""
