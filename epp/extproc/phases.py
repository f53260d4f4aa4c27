"""The phases of the request and of the answer of one HTTP request, as the data plane shows them, and which
phase may follow which.

`stream` owns the phase of the request, and `response` the phase of the answer. The two are independent: an
answer may begin before its request has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final


class Phase(enum.Enum):
    """Of the request."""

    START = enum.auto()
    """No request headers yet."""
    BODY = enum.auto()
    """Headers answered, the pick waits for the body."""
    HOLDING = enum.auto()
    """Headers not answered, the pick waits for the body."""
    WAITING = enum.auto()
    """The body is there, and flow control holds the request. Nothing is answered until it is decided."""
    PICKED = enum.auto()
    """The rest goes on as it comes."""
    PASSED = enum.auto()
    """Never to be picked: the rest goes on as it comes."""
    REFUSED = enum.auto()
    CLOSED = enum.auto()
    """Whatever was held is released."""

    # By identity, in C: the enum's own is a Python call for each lookup.
    __hash__ = object.__hash__


DECIDED: Final = frozenset({Phase.PICKED, Phase.PASSED, Phase.REFUSED, Phase.CLOSED})
"""Nothing of the body is gathered any more."""

FOLLOWS: Final[Mapping[Phase, AbstractSet[Phase]]] = {
    Phase.START: {Phase.BODY, Phase.HOLDING, *DECIDED},
    Phase.BODY: {Phase.WAITING, *DECIDED},
    Phase.HOLDING: {Phase.WAITING, *DECIDED},
    Phase.WAITING: DECIDED,
    Phase.PICKED: {Phase.CLOSED},
    Phase.PASSED: {Phase.CLOSED},
    Phase.REFUSED: {Phase.CLOSED},
    Phase.CLOSED: frozenset(),
}
"""The phases that may follow each phase."""


class ResponsePhase(enum.Enum):
    """Of the answer."""

    AWAITED = enum.auto()
    BEGUN = enum.auto()
    """Its headers came."""
    READING = enum.auto()
    """Some of its body came, and the answer is sampled."""
    DONE = enum.auto()

    # As above.
    __hash__ = object.__hash__


RESPONSE_FOLLOWS: Final[Mapping[ResponsePhase, AbstractSet[ResponsePhase]]] = {
    ResponsePhase.AWAITED: {ResponsePhase.BEGUN, ResponsePhase.DONE},
    ResponsePhase.BEGUN: {ResponsePhase.READING, ResponsePhase.DONE},
    ResponsePhase.READING: {ResponsePhase.DONE},
    ResponsePhase.DONE: frozenset(),
}
"""The phases that may follow each phase."""
