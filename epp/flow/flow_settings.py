"""The operator's settings for waiting requests. These are plain values; `control` applies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

Order = Literal["arrival", "deadline", "shortest"]
"""Which request of a tenant goes first: the first in order of arrival, the one with the earliest deadline, or
the one with the fewest tokens to compute. With `shortest`, a request still goes before every request that
comes later than `patience` times its own prefill time.
"""
SHORT_S: Final = 0.1
"""The headroom of a request that a more pressing request may overtake."""
LEAST_DELAY_S: Final = 0.01
"""Time between two checks of the same request, or of a fleet that has no room."""
LONGEST_DELAY_S: Final = 1.0
"""The longest time between two checks of a fleet without room, even without any event, since predictions may
be wrong.
"""
WhenLate = Literal["refuse", "demote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that may wait: a number of requests, and the bytes of their bodies."""

    requests: int = 10_000
    size_bytes: int = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    headroom_s: float | None = SHORT_S
    """A request is let go if the server that it would be sent to is predicted to begin with it within this
    time. None: if no more pressing request is expected to overtake it, the request goes at once to a server
    where it is in time; any other request goes within `SHORT_S`.
    """
    nearly_cached_s: float = 0.0
    """A request whose prefill takes at most this long goes once its server begins within `goal_s`, unless
    another request waits before it. Nearly all of its prompt is cached on that server, or is already being
    computed there, so the request would gain nothing by waiting here.
    """
    order: Order = "arrival"
    patience: float = 20.0
    """For the order `shortest`; see `Order`."""
    ttft_s: float = inf
    """Deadline of the first token for requests that name no deadline; inf: such requests have none."""
    when_late: WhenLate = "refuse"
    """What happens to a request that can no longer meet its deadline. `demote`: it goes behind the requests
    of its priority that can meet theirs.
    """
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
    forecasts_per_tenant: int = 16
    """How many requests of a tenant are tried, in order, when the first one waits for a server that holds its
    prefix.
    """
    max_forecasts: int = 32
    """The most forecasts that are made to find one request that may go."""
    goal_s: float = 2.0
    """The wait at which the saturation is 1."""

    def __post_init__(self) -> None:
        for name, value in (("headroom_s", self.headroom_s or 0.0), ("patience", self.patience)):
            if not 0 <= value < inf:
                raise ValueError(f"{name} must be 0 or more, and finite")
        if not all(t > 0 for t in (self.ttft_s, self.ttl_s, self.goal_s, *self.ttl_by_priority_s.values())):
            raise ValueError("ttft_s, ttl_s and goal_s must be above 0")
        if min(self.max_tenants, self.max_priorities, self.forecasts_per_tenant, self.max_forecasts) < 1:
            raise ValueError(
                "max_tenants, max_priorities, forecasts_per_tenant and max_forecasts must be at least 1"
            )

    def place(self, *, arrived_at: float, deadline: float, own_s: float) -> float:
        """Return the place of a request among those of its tenant; the smallest goes first."""
        if self.order == "deadline":
            return deadline
        return arrived_at + self.patience * own_s if self.order == "shortest" else arrived_at

    def ttl_of(self, priority: int) -> float:
        """Return the seconds that a request of this priority may wait."""
        return self.ttl_by_priority_s.get(priority, self.ttl_s)
