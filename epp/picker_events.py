"""The events of the picker, as one stream of typed values for all listeners.

The picker calls each listener with each event at once, in order. Metrics, the record of decisions, other
pickers (`sharing`) and exact mode (`kvevents`) are listeners. The picker knows none of them. A listener is on
the path of a request: it notes what it needs and returns. It must not keep `Began.asked`, which holds the
whole prompt, without a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from epp.decision import PickRequest
from epp.endpoints.state import EndpointState
from epp.prefilling import Held
from epp.routed_request import RoutedRequest
from epp.types import ChunkHash, Facts


class Began(Facts, frozen=True):
    """A request was sent to a server."""

    at: float
    request: RoutedRequest
    asked: PickRequest

    def picked_in_s(self, *, timer_s: float) -> float:
        """How long the picker took, by the streams' timer, without the time in a queue. 0: this was not
        measured.
        """
        if self.asked.began_s is None:
            return 0.0
        return max(0.0, timer_s - self.asked.began_s - self.request.decision.waited_s)


class Moved(Facts, frozen=True):
    """Another server than the first choice took the request; `request` already names it. An `Answered`
    follows.
    """

    at: float
    request: RoutedRequest


class Answered(Facts, frozen=True):
    """The headers of the answer came. The decision has the status."""

    at: float
    request: RoutedRequest
    mismatch: bool
    """Whether another server than the first choice answered."""


class Grew(Facts, frozen=True):
    """A server holds a chain that no request asked for: a prompt with its answer."""

    at: float
    server: EndpointState
    chain: Sequence[ChunkHash]


class Ended(Facts, frozen=True):
    """The request is over, or was let go on purpose. The decision's `outcome` says which."""

    at: float
    request: RoutedRequest


class PrefillBegan(Facts, frozen=True):
    """Another server has to compute the prompt of a request. The request's `Began` came just before."""

    at: float
    prefill: Held
    chain: Sequence[ChunkHash]
    adapter: str


class PrefillEnded(Facts, frozen=True):
    """That server has computed the prompt, or will not, or its end will not be known."""

    at: float
    prefill: Held
    outcome: Literal["computed", "lost", "detached"]
    failed: bool = False
    """Whether the prefill server is at fault, as far as the answer shows."""


class Restarted(Facts, frozen=True):
    """A server's counters went back, so another process with a cold cache serves under its name."""

    at: float
    server: EndpointState


class Hangs(Facts, frozen=True):
    """Requests wait for their first byte at a server while other servers answer. See `endpoints.failures`."""

    at: float
    server: EndpointState


class Cut(Facts, frozen=True):
    """A server cut an answer midway, as the data plane's access log says."""

    at: float
    server: EndpointState


PickerEvent = Began | Moved | Answered | Grew | Ended | PrefillBegan | PrefillEnded | Restarted | Hangs | Cut

Listener = Callable[[PickerEvent], None]


class Listeners:
    """The listeners, in the order in which they subscribed."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        self._all = (*self._all, listener)

    def remove(self, listener: Listener) -> None:
        """Harmless if it does not listen, and while an event is sent."""
        self._all = tuple(each for each in self._all if each != listener)

    def tell(self, event: PickerEvent) -> None:
        for listener in self._all:
            listener(event)
