"""What flow control shows of itself to people and to Prometheus. Filled in by `gate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from epp.metric import counter, gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTenant:
    """What waits of one tenant at one priority."""

    priority: int
    tenant: str
    demoted: bool
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """For people and metrics: what waits, for one base model."""

    model: str
    saturation: Annotated[
        float,
        gauge(
            "epp_flow_saturation",
            "0: the servers of the base model are idle. 1: a new request waits as long as "
            "flow.goalSeconds says. Above: they are too few. Only while flow control is on.",
        ),
    ]
    oldest_s: Annotated[
        float,
        gauge(
            "epp_flow_oldest_seconds",
            "How long the oldest of the requests that flow control holds has waited.",
        ),
    ]
    requests: Annotated[
        Mapping[int, int],
        gauge(
            "epp_flow_waiting_requests",
            "Requests that flow control holds, by base model and priority.",
            "priority",
        ),
    ]
    tokens: Annotated[
        Mapping[int, int],
        gauge(
            "epp_flow_waiting_tokens",
            "Prompt tokens to compute of the requests that flow control holds.",
            "priority",
        ),
    ]
    tenants: Sequence[WaitingTenant] = ()
    """Those of whom the most tokens wait."""
    let_go_tokens: Annotated[
        Mapping[str, int],
        counter(
            "epp_flow_let_go_tokens_total",
            "Prompt tokens to compute of the requests that flow control let go, by base model and tenant. "
            "The first 32 tenants have a label of their own, the others share `(others)`.",
            "tenant",
        ),
    ] = field(default_factory=dict)
    demoted: Annotated[
        int,
        counter(
            "epp_flow_demoted_requests_total",
            "Requests that flow control put last, since they could not meet their deadline.",
        ),
    ] = 0
