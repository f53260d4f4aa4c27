"""A request between its body and its pick, while flow control holds it: the part of `stream` that can be answered later.

Owns the ticket and what is to be answered after the pick. A request waits only where the data plane bears it: with full duplex
nothing is due until the answer to the headers; with BUFFERED the data plane is asked for more time, once, or the
request waits within the time-out of the data plane. In the other
modes no request waits, for the data plane would pass it by, or stop reading.

Memory: a waiting request keeps its canonical prompt, and with full duplex the body that is to be sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from epp.config.dialects import WAIT_SHARE
from epp.config.flow import Flow
from epp.decision import Pick, PickRequest
from epp.errors import PickError
from epp.extproc.events import Action, Delay, Modes, Slot
from epp.extproc.response import StreamSettings
from epp.gate import Claim, Ticket


class GatePort(Protocol):
    """What a stream asks of `epp.gate.Gate`."""

    @property
    def on(self) -> bool: ...
    @property
    def tried(self) -> Flow | None: ...
    def offer(
        self,
        request: PickRequest,
        claim: Claim,
        decided: Callable[[Pick | PickError, float], None],
        *,
        size_bytes: int,
        longest_s: float,
        now: float,
    ) -> Pick | Ticket: ...
    def leave(self, ticket: Ticket) -> None: ...


def longest_wait_s(slot: Slot, request: PickRequest, *, modes: Modes, settings: StreamSettings) -> float:
    """How long the data plane bears that the answer to `slot` does not come; 0: it must come now.

    A request without a prompt costs its server next to nothing, and goes at once.
    """
    if not request.inference.prompt:
        return 0.0
    if modes.request_body.echoed:
        return inf
    return settings.longest_delay_s or settings.given_delay_s if slot is Slot.REQUEST_BODY else 0.0


class Wait:
    """`offer` once; then `begin` if the request waits, and `leave` at the end of the stream, whatever happened."""

    __slots__ = ("_gate", "_ticket", "after", "slot")

    def __init__(self, gate: GatePort | None) -> None:
        self._gate = gate
        self._ticket: Ticket | None = None
        self.slot = Slot.REQUEST_BODY
        """What is answered with the pick."""
        self.after: Sequence[Action] = ()
        """What is answered after that."""

    @property
    def on(self) -> bool:
        return self._gate is not None and self._gate.on

    @property
    def tried(self) -> Flow | None:
        """The flow control of a policy in dry run."""
        return self._gate.tried if self._gate is not None else None

    @property
    def waits(self) -> bool:
        return self._ticket is not None

    def offer(
        self,
        slot: Slot,
        request: PickRequest,
        claim: Claim,
        decided: Callable[[Pick | PickError, float], None],
        *,
        longest_s: float,
        asks: bool,
        echoed: bool,
        now: float,
    ) -> Pick | Sequence[Action]:
        """A pick at once; or it waits, with what the data plane is told of that. PickError: refused.

        asks: the data plane is asked to wait for `longest_s`, which it would not do by itself.
        """
        assert self._gate is not None
        size_bytes = request.inference.held_bytes + (request.body_bytes if echoed else 0)
        offered = self._gate.offer(
            request, claim, decided, size_bytes=size_bytes, longest_s=WAIT_SHARE * longest_s, now=now
        )
        if isinstance(offered, Pick):
            return offered
        self._ticket, self.slot = offered, slot
        return (Delay(longest_s),) if asks and longest_s < inf else ()

    def decided(self) -> Sequence[Action]:
        """It waits no more; what is answered after the pick."""
        after, self.after, self._ticket = self.after, (), None
        return after

    def leave(self) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        ticket, self._ticket, self.after = self._ticket, None, ()
        if ticket is not None and self._gate is not None:
            self._gate.leave(ticket)
