"""What the picker remembers of one request from its pick to its end.

`extproc` carries it as a `Pick` and looks at nothing else; listeners read it in `picker_events`. Made and changed by `picker` alone.
"""

from __future__ import annotations

from epp.cache_beliefs import Prompt
from epp.decision import Pick
from epp.endpoints.backlog import Booking
from epp.endpoints.failures import Wait
from epp.endpoints.state import EndpointState
from epp.prefix_index.table import PrefixTable, Recorded
from epp.types import ChunkHash, InferenceRequest


class RoutedRequest(Pick, eq=False, kw_only=True):
    """A pick with what must be undone, moved or learned from later."""

    state: EndpointState
    booking: Booking
    streams: bool
    conversation: InferenceRequest | None
    """For what a sampled answer teaches: the request with only the end of its prompt, since thousands may be held."""
    prompt: Prompt
    recorded: Recorded | None
    table: PrefixTable
    process: int
    """Which process of the server it went to: a restarted one holds nothing of it."""
    wait: Wait
    """For its first byte."""
    responded: bool = False
    prefix_lost: bool = False
    """Its server did not compute the prompt: the table forgot it."""

    @property
    def chain(self) -> list[ChunkHash]:
        return self.prompt.chain


def own(pick: Pick) -> RoutedRequest:
    """A pick as the picker knows it."""
    assert isinstance(pick, RoutedRequest), "a pick comes back to the picker that made it"
    return pick
