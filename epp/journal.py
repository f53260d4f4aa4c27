"""What a picker did, as a list of plain entries, for whoever tells it to other pickers.

On the path of a request an entry is one append; what it means is read off the request later, by `epp.sharing`, which
drains the list several times a second. A picker without a journal keeps none. Entries are in the order of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from epp.decision import Decision
from epp.endpoints.backlog import Booking
from epp.endpoints.state import EndpointState
from epp.types import ChunkHash


class Work(Protocol):
    """One request under way, as it is now: a later event may have moved it since the entry was made."""

    @property
    def decision(self) -> Decision: ...

    @property
    def state(self) -> EndpointState:
        """Of the endpoint that serves it."""

    @property
    def booking(self) -> Booking: ...

    @property
    def chain(self) -> Sequence[ChunkHash]: ...

    @property
    def prefix_lost(self) -> bool:
        """Its server did not compute the prompt."""


Entry = (
    tuple[Literal["began", "moved", "over"], float, Work]
    | tuple[Literal["grew"], float, EndpointState, Sequence[ChunkHash]]
    | tuple[Literal["restarted"], float, EndpointState]
)
"""What, when, of whom. grew: the server holds this chain, which no request asked for; restarted: seen from its counters."""

Journal = list[Entry]
