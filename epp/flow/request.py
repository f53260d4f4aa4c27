"""One request at the gate: the question to the picker, the record while it waits, and its outcome."""

from __future__ import annotations

from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Struct

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

RefusedFor = Literal["deadline", "ttl", "full"]
"""`deadline`: its first token would come too late. `ttl`: it has waited too long.
`full`: a bound was reached and it was worth least."""


class Forecast(Struct, frozen=True):
    """The predicted course of a request if it were sent now."""

    wait_s: float
    """Until the server that the rule chooses begins with it: B/V there."""
    soonest_s: float
    """Until its first token at the soonest, on whatever server: the least (B + U)/V + T.
    Where the chosen server meets the deadline, what it takes there will do."""
    own_s: float
    """Its own prefill on the server that the rule chooses, and the loading of its adapter: U/V + T there."""
    tokens: int
    """Prompt tokens that the chosen server would compute: U."""


class Pool(NamedTuple):
    """Figures of all servers together."""

    servers: int
    undone_s: float
    """Time until the servers have computed everything sent to them, if the work were shared equally."""
    tokens_per_s: float


class Forecaster(Protocol[T_contra]):
    """The door to the rest: what the picker predicts. Its methods leave everything as it was."""

    def least_wait_s(self, *, now: float) -> float:
        """The least B/V of all servers: nobody can begin sooner.
        One pass over the servers, no look at any prompt.
        """

    def pool(self, *, now: float) -> Pool:
        """One pass over the servers, as above."""

    def forecast(self, payload: T_contra, *, now: float) -> Forecast:
        """For one request. Where no server can take the request:
        wait 0, so that the request goes to the picker's refusal.
        """


class Held(Generic[T]):
    """A request that waits, or did. Public to read; `control` and `queues` alone write."""

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
        """In order of arrival."""
        self.priority = priority
        self.tenant = tenant
        """Whose share it is charged to: the tenant's name, or `OTHERS`."""
        self.size_bytes = size_bytes
        self.tokens = tokens
        """Tokens to compute, as forecast when it came."""
        self.arrived_at = arrived_at
        self.deadline = deadline
        """When its first token is due; inf: at no time."""
        self.turn_at = 0.0
        """Demoted, it goes before all others of its priority from then on."""
        self.last_at = 0.0
        """Demoted, it waits no longer than until then for others of its priority."""
        self.short = False
        """Demoted, it may use every server."""
        self.expires_at = expires_at
        self.key: tuple[float, int] = (0.0, number)
        """Its place among the requests of its tenant."""
        self.late = False
        """Demoted: it can no longer meet its deadline."""
        self.waits = False


class LetGo(Struct, Generic[T], frozen=True):
    """Send it now, before the next question is asked: its booking is what the next one has to reckon with."""

    held: Held[T]


class Refused(Struct, Generic[T], frozen=True):
    held: Held[T]
    reason: RefusedFor
    retry_after_s: int


Verdict = LetGo[T] | Refused[T]
