"""Holds one stream's request while flow control lets it wait, and the answers that follow its pick.

A request waits only in modes that allow it. With full duplex, no message is due before the answer to the
headers. With BUFFERED, the picker asks the data plane for more time once, or the request waits within the
time-out of the data plane. In the other modes no request waits, because the data plane would go on without
the picker, or would stop reading.

Pure. `stream` owns a `WaitingStream` for as long as its request waits.

A waiting request keeps its canonical prompt in memory. With full duplex it also keeps the body that the
picker sends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from epp.base.errors import PickError
from epp.config.dialects import WAIT_SHARE
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.gate import Gate
from epp.picker.model_queue import WaitingRequest
from epp.picker.unserved import UnservedRequest
from epp.protocol.asking import Asked, StreamContext, StreamSettings
from epp.protocol.http_events import Action, Delay, Modes, Slot


@dataclass(slots=True, eq=False)
class WaitingStream:
    """A request that waits until `gate` decides, or until it leaves."""

    gate: Gate
    held: WaitingRequest | UnservedRequest
    asked: Asked
    slot: Slot
    """The message whose answer carries the pick."""
    delays: Sequence[Action]
    """Actions that report the wait to the data plane."""
    after: Sequence[Action] = ()
    """The answers that follow the answer with the pick."""

    def leave(self) -> None:
        """Stop waiting, since the stream no longer needs the answer."""
        self.gate.leave(self.held)


def offer(
    gate: Gate,
    asked: Asked,
    decided: Callable[[Pick | PickError, float], None],
    *,
    context: StreamContext,
    slot: Slot,
    modes: Modes,
    now: float,
) -> Pick | WaitingStream:
    """Ask flow control. Return a pick if the request goes at once. Raises PickError if the request is
    refused.

    decided: called with the pick or the refusal of a request that waited.

    slot: the message whose answer carries the pick.
    """
    question, settings = asked.question, context.settings
    longest_s = _longest_s(slot, question, modes, settings)
    if longest_s <= 0 or not gate.on:
        return context.picker.pick(question, now=now)
    keeps_body = asked.changed_body is not None or modes.request_body.echoed
    offered = gate.offer(
        question,
        asked.head.claim,
        decided,
        size_bytes=question.inference.held_bytes + (question.body_bytes if keeps_body else 0),
        longest_s=WAIT_SHARE * longest_s,
        now=now,
    )
    if isinstance(offered, Pick):
        return offered
    asks_for_more = settings.longest_delay_s > 0 and longest_s < inf
    return WaitingStream(gate, offered, asked, slot=slot, delays=(Delay(longest_s),) if asks_for_more else ())


def _longest_s(slot: Slot, question: Question, modes: Modes, settings: StreamSettings) -> float:
    """Return how many seconds the data plane can wait for the answer to `slot`. 0: the answer must come now.

    A request without a prompt costs its server next to nothing, and goes at once.
    """
    if not question.inference.prompt:
        return 0.0
    if modes.request_body.echoed:
        return inf
    return settings.longest_delay_s or settings.given_delay_s if slot is Slot.REQUEST_BODY else 0.0
