"""The picker's record of one request from its pick to its end.

`extproc` holds it as a `Pick` and does not look inside. Listeners read it in `picker_events`. Only `picker`
makes and changes it.
"""

from __future__ import annotations

from epp.decision import Phase, Pick
from epp.endpoints.backlog import Booking
from epp.endpoints.state import EndpointState
from epp.endpoints.symptoms import Wait
from epp.prefilling import Held
from epp.prefix_index.table import PrefixTable, Recorded
from epp.server_caches import Prompt
from epp.types import ChunkHash, InferenceRequest


class RoutedRequest(Pick, eq=False, kw_only=True, gc=False):
    """A pick with everything that may have to be undone or moved, or that the picker learns from later."""

    state: EndpointState
    booking: Booking
    streams: bool
    conversation: InferenceRequest | None
    """For learning from a sampled answer: the request with only the end of its prompt, because thousands of
    requests may be kept.
    """
    prompt: Prompt
    recorded: Recorded | None
    table: PrefixTable
    process: int
    """The process of the server that got the request. A restarted server holds nothing of it."""
    wait: Wait
    """The wait for its first byte."""
    place: int = 0
    """See `PickRequest.place`."""
    prefill: Held | None = None
    """The work of a prefill server for it. None: its own server computes the prompt."""
    prefix_lost: bool = False
    """Whether the table has forgotten its prompt, because the server did not compute it."""

    @property
    def chain(self) -> list[ChunkHash]:
        return self.prompt.chain

    @property
    def asks(self) -> bool:
        """Whether the request has a body. A good answer to another one, such as `GET /health`, does not show
        that the server computes.
        """
        decision = self.decision
        return bool(decision.model) or self.prompt.size.text_bytes > 0 or bool(decision.unread)

    @property
    def computed(self) -> bool:
        """Whether the request is over and its server answered it well."""
        status = self.decision.status
        return self.phase is Phase.ENDED and status is not None and status < 400 and self.asks

    @property
    def failed(self) -> bool:
        """Whether the server is at fault, as far as the answer shows. An error counts against the server that
        computed the prompt.
        """
        status = self.decision.status
        if self.phase is Phase.FAILED:
            return True
        return self.prefill is None and status is not None and is_fault(status)


def is_fault(status: int) -> bool:
    """Whether an answer of this status shows a sick server. Other errors are the client's. 501 is how vLLM
    answers if the model does not have the API that the client asks for.
    """
    return (status >= 500 and status != 501) or status == 429


def own(pick: Pick) -> RoutedRequest:
    assert isinstance(pick, RoutedRequest), "a pick comes back to the picker that made it"
    return pick
