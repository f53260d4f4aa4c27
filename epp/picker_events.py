"""What happens in the picker, as one stream of typed events for everybody who wants to know.

The picker calls each listener with each event at the moment when it happens, in order. Metrics, the decisions that people look at,
other pickers (`sharing`) and exact mode (`kvevents`) are listeners; the picker knows none of them. A listener is on the path of a
request: it notes what it needs and returns. It must not keep `Began.inference`, which holds the whole prompt, without a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from epp.endpoints.state import EndpointState
from epp.routed_request import RoutedRequest
from epp.types import ChunkHash, InferenceRequest


class Began(Struct, frozen=True, eq=False):
    """A request was sent to a server."""

    at: float
    request: RoutedRequest
    inference: InferenceRequest


class Moved(Struct, frozen=True, eq=False):
    """Another server than the first choice took the request; `request` names it by now. An `Answered` follows."""

    at: float
    request: RoutedRequest


class Answered(Struct, frozen=True, eq=False):
    """The headers of the answer came; the decision holds the status."""

    at: float
    request: RoutedRequest
    mismatch: bool
    """Another server than the first choice answered."""


class Grew(Struct, frozen=True, eq=False):
    """A server holds a chain that no request asked for: a prompt with its answer."""

    at: float
    server: EndpointState
    chain: Sequence[ChunkHash]


class Ended(Struct, frozen=True, eq=False):
    """The request is over, or was let go on purpose; the decision's `outcome` says which."""

    at: float
    request: RoutedRequest


class Restarted(Struct, frozen=True, eq=False):
    """A server's counters went back: another process with a cold cache serves under its name."""

    at: float
    server: EndpointState


class Hangs(Struct, frozen=True, eq=False):
    """Requests wait for their first byte at a server while others answer; see `endpoints.failures`."""

    at: float
    server: EndpointState


PickerEvent = Began | Moved | Answered | Grew | Ended | Restarted | Hangs

Listener = Callable[[PickerEvent], None]
