"""Defines the data of one request in flow control: its forecast, its item in the queue, and the decision on
it. Also defines `Forecaster`, through which flow control asks the picker for forecasts.
"""

from __future__ import annotations

from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

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


class Pool(NamedTuple):
    """Figures of all servers together."""

    servers: int
    undone_s: float
    """The time until the servers have computed everything sent to them, if the work were shared equally."""
    tokens_per_s: float


class Forecaster(Protocol[T_contra]):
    """Predicts the course of requests. Flow control sees nothing else of the picker. The methods change
    nothing.
    """

    def least_wait_s(self, *, now: float) -> float:
        """Return the least B/V of all servers: no server can begin sooner. The method makes one pass over the
        servers and reads no prompt.
        """

    def pool(self, *, now: float) -> Pool:
        """Return the figures of all servers. This method also makes one pass over the servers."""

    def forecast(self, payload: T_contra, *, now: float) -> Forecast:
        """Return the forecast for one request. If no server can take the request, the forecast is a wait
        of 0, so that the request goes to the picker and is refused there.
        """


class QueueItem(Generic[T]):
    """A request in flow control. All modules may read it. Only `control`, `queues` and `demoted` write it."""

    __slots__ = (
        "arrived_at",
        "deadline",
        "expires_at",
        "key",
        "last_at",
        "late",
        "number",
        "payload",
        "priority",
        "short",
        "size_bytes",
        "tenant",
        "tokens",
        "turn_at",
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
        self.turn_at = 0.0
        """From this time on, a demoted request goes before all others of its priority. 0: not set."""
        self.last_at = 0.0
        """From this time on, a demoted request goes even if no server is free for demoted requests."""
        self.short = False
        """Once the request is demoted, it may use every server."""
        self.expires_at = expires_at
        self.key: tuple[float, int] = (0.0, number)
        """The place among the requests of its tenant."""
        self.late = False
        """The request is demoted: it can no longer meet its deadline."""
        self.waits = False


class LetGo(Struct, Generic[T], frozen=True, gc=False):
    """The decision that the request goes now. The caller must send the request before it calls flow control
    again, because the next decision has to count the booking of this request.
    """

    item: QueueItem[T]


class Refused(Struct, Generic[T], frozen=True, gc=False):
    item: QueueItem[T]
    reason: RefusedFor
    retry_after_s: int


Verdict: TypeAlias = "LetGo[T] | Refused[T]"
