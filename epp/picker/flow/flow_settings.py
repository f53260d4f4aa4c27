"""The operator's settings for waiting requests. These are plain values; `control` applies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

Order = Literal["arrival", "deadline", "shortest"]
"""Which request of a tenant goes first: the first in order of arrival, the one with the earliest deadline, or
the one with the fewest tokens to compute.
"""
PATIENCE: Final = 20.0
"""With the order `shortest`, a request goes before every request that comes later than this many times its
own prefill time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that may wait: a number of requests, and the bytes of their bodies."""

    requests: int = 10_000
    size_bytes: int = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    order: Order = "arrival"
    ttft_s: float = inf
    """Deadline of the first token for requests that name no deadline; inf: such requests have none."""
    ttl_s: float = inf
    """The longest wait at the gateway. After this wait the request is refused."""
    ttl_by_priority_s: Mapping[int, float] = field(default_factory=dict)
    """The longest wait for requests of one priority, instead of `ttl_s`."""
    in_all: Bound = Bound()
    per_priority: Bound = Bound()
    per_tenant: Bound = Bound()
    """The bound of one tenant's requests of one priority."""
    max_tenants: int = 256
    """The most tenants of each priority. Further tenants share one queue."""
    max_priorities: int = 16
    """The most priorities. A request of a further priority is kept at the next lower priority in use."""
    max_forecasts: int = 4
    """The most forecasts that are made to find one request that may go. Further requests are tried after the
    next event.
    """
    goal_s: float = 2.0
    """The wait at which the saturation is 1."""

    def __post_init__(self) -> None:
        if not all(t > 0 for t in (self.ttft_s, self.ttl_s, self.goal_s, *self.ttl_by_priority_s.values())):
            raise ValueError("ttft_s, ttl_s and goal_s must be above 0")
        if min(self.max_tenants, self.max_priorities, self.max_forecasts) < 1:
            raise ValueError("max_tenants, max_priorities and max_forecasts must be at least 1")

    def place(self, *, arrived_at: float, deadline: float, own_s: float) -> float:
        """Return the place of a request among those of its tenant; the smallest goes first."""
        if self.order == "deadline":
            return deadline
        return arrived_at + PATIENCE * own_s if self.order == "shortest" else arrived_at

    def ttl_of(self, priority: int) -> float:
        """Return the seconds that a request of this priority may wait."""
        return self.ttl_by_priority_s.get(priority, self.ttl_s)
