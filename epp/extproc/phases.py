"""The phases of the request and of the answer of one HTTP request, and which phase may follow which.

`stream` owns the phase of the request, and `response` the phase of the answer. The two are independent: an
answer may begin before its request has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final


class Phase(enum.Enum):
    """The phase of the request."""

    START = enum.auto()
    """No request headers have come yet."""
    BODY = enum.auto()
    """The headers are answered. The pick waits for the body."""
    HOLDING = enum.auto()
    """The headers are not answered. The pick waits for the body."""
    WAITING = enum.auto()
    """The body has come, and flow control holds the request. Nothing is answered until flow
    control decides.
    """
    PICKED = enum.auto()
    """The pick is made. The rest of the request goes on unchanged."""
    PASSED = enum.auto()
    """The request will never be picked. The rest of it goes on unchanged."""
    REFUSED = enum.auto()
    CLOSED = enum.auto()
    """All that the stream held is released."""

    # Hashed by identity, in C. The hash of Enum is a Python function, which would be called for each lookup.
    __hash__ = object.__hash__


DECIDED: Final = frozenset({Phase.PICKED, Phase.PASSED, Phase.REFUSED, Phase.CLOSED})
"""In these phases no more of the body is collected."""

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
    """The phase of the answer."""

    AWAITED = enum.auto()
    BEGUN = enum.auto()
    """The headers of the answer came."""
    READING = enum.auto()
    """Part of the body came, and the answer is sampled."""
    DONE = enum.auto()

    # Hashed by identity, as above.
    __hash__ = object.__hash__


RESPONSE_FOLLOWS: Final[Mapping[ResponsePhase, AbstractSet[ResponsePhase]]] = {
    ResponsePhase.AWAITED: {ResponsePhase.BEGUN, ResponsePhase.DONE},
    ResponsePhase.BEGUN: {ResponsePhase.READING, ResponsePhase.DONE},
    ResponsePhase.READING: {ResponsePhase.DONE},
    ResponsePhase.DONE: frozenset(),
}
"""The phases that may follow each phase."""
