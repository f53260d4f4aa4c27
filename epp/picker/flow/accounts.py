"""What flow control counts of the requests that it lets go: the tokens of each tenant, for people; the length
of each tenant's answers.
Also defines the state of flow control as people and Prometheus see it, which `FlowControl.status` fills in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from epp.base.metric import counter, gauge
from epp.picker.flow.queues import OTHERS

OTHERS_LABEL: Final = "(others)"
"""The name that people see for all other tenants together."""
MOST_SHOWN: Final = 32
"""The most tenants that are named; each is a time series."""
_MOST_TENANTS: Final = 1024
"""The most tenants that are remembered. The tenant whose last sample is the oldest is forgotten first."""
_FIRST_TOKENS: Final = 200.0
"""The assumed length before the first sample."""
_MOST_SAMPLES: Final = 20
"""A mean follows the last samples: about this many of them count."""


def add_for(tenant: str, tokens: int, by_tenant: dict[str, int]) -> None:
    """Add tokens to the count of a tenant, by the name that people see."""
    if tenant not in by_tenant:
        named = len(by_tenant) - (OTHERS_LABEL in by_tenant)
        tenant = OTHERS_LABEL if tenant == OTHERS or named >= MOST_SHOWN else tenant
    by_tenant[tenant] = by_tenant.get(tenant, 0) + tokens


class AnswerLengths:
    """The tokens of answers by tenant, from sampled answers."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}
        """The mean of each tenant, and the number of samples that count in it. The latest sample is last."""
        self._mean_of_all = _FIRST_TOKENS, 0

    def expected(self, tenant: str, *, most: float) -> float:
        """Return the tokens that an answer will probably have. most: the request's own limit."""
        return min(most, self._means.get(tenant, self._mean_of_all)[0])

    def learn(self, tenant: str, tokens: int) -> None:
        mean, samples = self._means.pop(tenant, (self._mean_of_all[0], 0))
        self._means[tenant] = _with(mean, samples, tokens)
        self._mean_of_all = _with(*self._mean_of_all, tokens)
        if len(self._means) > _MOST_TENANTS:
            del self._means[next(iter(self._means))]


def _with(mean: float, samples: int, tokens: int) -> tuple[float, int]:
    samples = min(samples, _MOST_SAMPLES) + 1
    return mean + (tokens - mean) / samples, samples


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
    )
    unknown_objectives: int = counter(
        "epp_flow_unknown_objectives_total",
        "Requests whose objective header names neither an InferenceObjective of the picker's pools nor a name "
        "in flow.objectives. They have the priority that they would have without this header.",
    )
