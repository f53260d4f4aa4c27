"""The picker's record of one request from its pick to its end.

`extproc` holds it as a `Pick` and does not look inside. Listeners read it in `picker_events`. Only `picker`
makes and changes it.
"""

from __future__ import annotations

from epp.decision import Phase, Pick
from epp.endpoints.backlog import Booking
from epp.endpoints.failures import Wait
from epp.endpoints.state import EndpointState
from epp.prefilling import Held
from epp.prefix_index.table import PrefixTable, Recorded
from epp.server_caches import Prompt
from epp.types import ChunkHash, InferenceRequest


class RoutedRequest(Pick, eq=False, kw_only=True, gc=False):
    """A pick with what must be undone, moved or learned from later."""

    state: EndpointState
    booking: Booking
    streams: bool
    conversation: InferenceRequest | None
    """For what a sampled answer teaches:
    the request with only the end of its prompt, since thousands may be held."""
    prompt: Prompt
    recorded: Recorded | None
    table: PrefixTable
    process: int
    """Which process of the server it went to: a restarted one holds nothing of it."""
    wait: Wait
    """For its first byte."""
    prefill: Held | None = None
    """What another server computes for it; None: its own server computes the prompt."""
    prefix_lost: bool = False
    """Its server did not compute the prompt: the table forgot it."""

    @property
    def chain(self) -> list[ChunkHash]:
        return self.prompt.chain

    @property
    def computed(self) -> bool:
        """The request is over, and its server did what it was asked."""
        status = self.decision.status
        return self.phase is Phase.ENDED and status is not None and status < 400

    @property
    def failed(self) -> bool:
        """Its server is at fault, as far as the answer tells.
        An error is laid to the server that computed the prompt.
        """
        status = self.decision.status
        if self.phase is Phase.FAILED:
            return True
        return self.prefill is None and status is not None and is_fault(status)


def is_fault(status: int) -> bool:
    """Whether an answer of this status says that the server is sick. Other errors are the client's."""
    return status >= 500 or status == 429


def own(pick: Pick) -> RoutedRequest:
    """A pick as the picker knows it."""
    assert isinstance(pick, RoutedRequest), "a pick comes back to the picker that made it"
    return pick
