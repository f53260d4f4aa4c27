"""The state of flow control as people and Prometheus see it. `ModelQueue.status` fills it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epp.base.metric import counter, gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTenant:
    """The waiting requests of one tenant at one priority."""

    priority: int
    tenant: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """The requests that wait for one base model."""

    model: str
    saturation: float = gauge(
        "epp_flow_saturation",
        "0: the servers of the base model are idle. 1: a new request waits as long as flow.goalSeconds "
        "says. Above 1: there are too few servers. Only while flow control is on.",
    )
    oldest_s: float = gauge(
        "epp_flow_oldest_seconds", "How long the oldest request that flow control holds has waited."
    )
    requests: Mapping[int, int] = gauge(
        "epp_flow_waiting_requests",
        "Requests that flow control holds, by base model and priority.",
        "priority",
    )
    tokens: Mapping[int, int] = gauge(
        "epp_flow_waiting_tokens",
        "Uncached prompt tokens of the requests that flow control holds, by base model and priority.",
        "priority",
    )
    tenants: Sequence[WaitingTenant] = ()
    """The tenants with the most waiting tokens."""
    let_go_tokens: Mapping[str, int] = counter(
        "epp_flow_let_go_tokens_total",
        "Tokens of the requests that flow control let go, by base model and tenant: uncached prompt tokens, "
        "and twice the tokens that their answers probably have. The first 32 tenants have a label of their own. All others share the label `(others)`.",
        "tenant",
        default_factory=dict,
    )
    unknown_objectives: int = counter(
        "epp_flow_unknown_objectives_total",
        "Requests whose objective header names neither an InferenceObjective of the picker's pools nor a name "
        "in flow.objectives. They have the priority that they would have without this header.",
        default=0,
    )
