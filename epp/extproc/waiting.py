"""One stream's request while flow control holds it, and which answers follow its pick.

A request waits only in modes that allow it. With full duplex, no message is due before the answer to the
headers. With BUFFERED, the picker asks the data plane for more time once, or the request waits within the
time-out of the data plane. In the other modes no request waits, because the data plane would go on without
the picker, or would stop reading.

Pure. Owned by `stream`, if there is flow control.

Memory: a waiting request keeps its canonical prompt, and with full duplex the body that is to be sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from epp.config.dialects import WAIT_SHARE
from epp.config.flow import Flow
from epp.decision import PickRequest
from epp.errors import PickError
from epp.extproc.events import Action, Delay, Modes, Slot
from epp.extproc.response import StreamSettings
from epp.gate import Claim, Gate
from epp.model_queue import WaitingRequest
from epp.picker_events import Pick


class Waiting:
    """`offer` the request once. When it goes, `go_on` says what to answer. `leave` at the stream's end."""

    __slots__ = ("_after", "_gate", "_held", "_settings", "_slot")

    def __init__(self, gate: Gate, settings: StreamSettings) -> None:
        self._gate = gate
        self._settings = settings
        self._held: WaitingRequest | None = None
        self._slot = Slot.REQUEST_BODY
        """The message whose answer carries the pick."""
        self._after: Sequence[Action] = ()
        """The answers that follow that one."""

    @property
    def held(self) -> bool:
        return self._held is not None

    @property
    def read(self) -> Flow | None:
        return self._gate.read

    def offer(
        self,
        slot: Slot,
        request: PickRequest,
        claim: Claim,
        decided: Callable[[Pick | PickError, float], None],
        *,
        modes: Modes,
        keeps_body: bool,
        now: float,
    ) -> Pick | Sequence[Action] | None:
        """Returns a pick, if the request goes at once. If the request waits, this returns the actions that
        report the wait to the data plane. None: the request may not wait.

        decided: called with the pick or the refusal of a request that waited.

        keeps_body: the picker holds the body, to send it on.
        """
        longest_s = self._longest_s(slot, request, modes)
        if longest_s <= 0:
            return None
        offered = self._gate.offer(
            request,
            claim,
            decided,
            size_bytes=request.inference.held_bytes + (request.body_bytes if keeps_body else 0),
            longest_s=WAIT_SHARE * longest_s,
            now=now,
        )
        if isinstance(offered, Pick):
            return offered
        self._held, self._slot = offered, slot
        return (Delay(longest_s),) if self._settings.longest_delay_s > 0 and longest_s < inf else ()

    def _longest_s(self, slot: Slot, request: PickRequest, modes: Modes) -> float:
        """Return how many seconds the data plane can wait for the answer to `slot`; 0: the answer must come
        now.

        A request without a prompt costs its server next to nothing, and goes at once.
        """
        if not self._gate.on or not request.inference.prompt:
            return 0.0
        if modes.request_body.echoed:
            return inf
        settings = self._settings
        return settings.longest_delay_s or settings.given_delay_s if slot is Slot.REQUEST_BODY else 0.0

    def answer_after(self, actions: Sequence[Action]) -> bool:
        """Send these actions after the answer with the pick. False: the request does not wait."""
        if self.held:
            self._after = (*self._after, *actions)
        return self.held

    def go_on(self) -> tuple[Slot, Sequence[Action]]:
        """Called when the request no longer waits. Returns the message whose answer carries the pick, and the
        actions that follow.
        """
        after, self._after, self._held = self._after, (), None
        return self._slot, after

    def leave(self) -> None:
        """Stop waiting, since the stream no longer needs the answer. Idempotent."""
        held, self._held, self._after = self._held, None, ()
        if held is not None:
            self._gate.leave(held)

    def check_integrity(self) -> None:
        assert not self._after or self.held
