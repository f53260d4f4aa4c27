"""Asks flow control for a request that its data plane lets wait. Pure; called by `stream`."""

from collections.abc import Callable, Sequence
from math import inf

from epp.base.errors import PickError
from epp.config.dialects import WAIT_SHARE
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.gate import Gate, WaitingRequest
from epp.picker.unserved import UnservedRequest
from epp.protocol.asking import Asked, StreamContext, StreamSettings
from epp.protocol.http_events import Delay, Modes, Slot


def offer(
    gate: Gate,
    asked: Asked,
    slot: Slot,
    context: StreamContext,
    *,
    modes: Modes,
    on_decided: Callable[[Pick | PickError, float], None],
    now: float,
) -> tuple[Pick | WaitingRequest | UnservedRequest, Sequence[Delay]]:
    """Return the pick, or the request that waits until `on_decided` is called, with the message that tells
    the data plane so. Raises PickError.
    """
    question, settings = asked.question, context.settings
    longest_s = longest_wait_s(slot, question, modes, settings)
    if longest_s <= 0 or not gate.on:
        return context.picker.pick(question, now=now), ()
    keeps_body = asked.changed_body is not None or modes.request_body.echoed
    offered = gate.offer(
        question,
        asked.head.claim,
        on_decided,
        size_bytes=question.inference.held_bytes + (question.body_bytes if keeps_body else 0),
        longest_s=WAIT_SHARE * longest_s,
        now=now,
    )
    return offered, (Delay(longest_s),) if settings.longest_delay_s > 0 and longest_s < inf else ()


def longest_wait_s(slot: Slot, question: Question, modes: Modes, settings: StreamSettings) -> float:
    """Return how many seconds the data plane can wait for the answer to `slot`. 0: the answer must come now.

    With full duplex, no message is due before the answer to the headers. With BUFFERED, the picker asks for
    more time once, or the request waits within the data plane's time-out. In the other modes the data plane
    would go on without the picker, or would stop reading. A request without a prompt costs its server next to
    nothing, and goes at once.
    """
    if not question.inference.prompt:
        return 0.0
    if modes.request_body.echoed:
        return inf
    return settings.longest_delay_s or settings.given_delay_s if slot is Slot.REQUEST_BODY else 0.0
