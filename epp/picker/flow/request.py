"""Defines the data of one request in flow control: its forecast, its item in the queue, and its refusal. Also
defines `Forecaster`, through which flow control asks the picker for forecasts.
"""

from __future__ import annotations

from math import inf
from typing import Generic, Literal, Protocol, TypeVar

from msgspec import Struct

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

RefusedFor = Literal["deadline", "ttl", "full"]
"""`deadline`: the first token would come too late. `ttl`: the request has waited too long. `full`: a bound
was reached, and the request was worth least.
"""


class Forecast(Struct, frozen=True, gc=False):
    """The predicted course of a request if it were sent now."""

    wait_s: float
    """The time until the server that the rule chooses begins with the request: B/V of that server."""
    soonest_s: float
    """The shortest time until the first token on any server: the least (B + U)/V + T. If the chosen server
    meets the deadline, the forecast may hold the time on that server instead.
    """
    own_s: float
    """The time for the prefill of this request and for the loading of its adapter, on the server that the
    rule chooses: U/V + T of that server.
    """
    tokens: int
    """The prompt tokens that the chosen server would compute: U."""
    most_answer_tokens: float = inf
    """The most tokens that the client lets the answer have."""


class Forecaster(Protocol[T_contra]):
    """Predicts the course of requests. Flow control sees nothing else of the picker. The methods change
    nothing.
    """

    def least_wait_s(self, *, now: float) -> float:
        """Return the least B/V of all servers: no server can begin sooner. The method makes one pass over the
        servers and reads no prompt.
        """

    def forecast(self, payload: T_contra, *, now: float) -> Forecast:
        """Return the forecast for one request. If no server can take the request, the forecast is a wait
        of 0, so that the request goes to the picker and is refused there.
        """


class QueueItem(Generic[T]):
    """A waiting request. All modules may read it. Only `control` and `queues` write it."""

    __slots__ = (
        "arrived_at",
        "deadline",
        "expires_at",
        "key",
        "look_at",
        "number",
        "payload",
        "priority",
        "size_bytes",
        "tenant",
        "tokens",
        "waits",
    )  # fmt: skip

    def __init__(
        self,
        payload: T,
        *,
        number: int,
        priority: int,
        tenant: str,
        size_bytes: int,
        tokens: int,
        arrived_at: float,
        deadline: float,
        expires_at: float,
        place: float = 0.0,
    ) -> None:
        self.payload = payload
        self.number = number
        """The number of the request in order of arrival."""
        self.priority = priority
        self.tenant = tenant
        """The name under which the share is charged: the name of the tenant, or `OTHERS`."""
        self.size_bytes = size_bytes
        self.tokens = tokens
        """Tokens to compute, as forecast when the request came."""
        self.arrived_at = arrived_at
        self.deadline = deadline
        """When the first token is due; inf: no deadline."""
        self.expires_at = expires_at
        self.key = (place, number)
        """The place among the requests of its tenant."""
        self.look_at = 0.0
        """The search passes over the request until then, because its server is predicted to be busy."""
        self.waits = False


class Refusal(Struct, frozen=True, gc=False):
    reason: RefusedFor
    retry_after_s: int
