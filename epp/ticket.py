"""What the picker remembers of one request between its pick and its end.

Opaque to everybody else: `extproc` carries it as a `Pick`, and the journal names it as `Work`. Made and changed by `picker` alone.
"""

from __future__ import annotations

from epp.cache_beliefs import Prompt
from epp.decision import Pick
from epp.endpoints.backlog import Booking
from epp.endpoints.failures import Wait
from epp.endpoints.state import EndpointState
from epp.prefix_index.hashing import ChunkSchedule
from epp.prefix_index.table import PrefixTable, Recorded
from epp.residency import Routed, RoutedQueue
from epp.types import ChunkHash, InferenceRequest


class Ticket(Pick, eq=False, kw_only=True):
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
    awaited: InferenceRequest | None = None
    """For exact mode, until the answer begins."""
    responded: bool = False
    prefix_lost: bool = False
    """Its server did not compute the prompt: the table forgot it."""

    @property
    def chain(self) -> list[ChunkHash]:
        return self.prompt.chain

    def hand_over(self, queue: RoutedQueue, schedule: ChunkSchedule, *, now: float) -> None:
        """Its server has begun to answer the prompt: exact mode may look at it, if it wants to."""
        inference, self.awaited = self.awaited, None
        if inference is None:
            return
        endpoint = self.state.endpoint
        routed = Routed(
            server=endpoint.name,
            process=self.process,
            model=endpoint.model,
            adapter=self.decision.adapter,
            inference=inference,
            chain=self.chain,
            schedule=schedule,
            at=now,
        )
        queue.put(routed)

    def let_go(self, queue: RoutedQueue) -> None:
        """No answer will begin: exact mode has no use for the prompt."""
        inference, self.awaited = self.awaited, None
        if inference is not None:
            queue.let_go(inference)


def own(pick: Pick) -> Ticket:
    """A pick as the picker knows it."""
    assert isinstance(pick, Ticket), "a pick comes back to the picker that made it"
    return pick
