"""The phase of one HTTP request, from its first message to the end of its answer, and which phase may follow
which. `stream` owns the phase.

An answer may begin before the request's body has ended. It may even begin before the request is picked, if
the data plane itself answers. From then on the rest of the request goes on unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final


class Phase(enum.Enum):
    START = enum.auto()
    """No request headers have come yet."""
    BODY = enum.auto()
    """The headers are answered. The pick waits for the body, which comes in one message."""
    HOLDING = enum.auto()
    """The headers are not answered. The pick waits for the pieces of the body."""
    WAITING = enum.auto()
    """The body has come, and flow control holds the request. Nothing is answered until flow
    control decides.
    """
    PICKED = enum.auto()
    """The pick is made. The rest of the request goes on unchanged."""
    PASSED = enum.auto()
    """The request came without its headers, so it will never be picked. The rest of the request goes on
    unchanged.
    """
    REFUSED = enum.auto()
    """The picker has answered the client itself. Nothing more is answered."""
    ANSWERED = enum.auto()
    """The headers of the answer came, with a pick or without."""
    READING = enum.auto()
    """Part of the answer's body came, and the answer is sampled."""
    DONE = enum.auto()
    """The answer has ended."""
    CLOSED = enum.auto()
    """All that the stream held is released."""

    # The hash is by identity, in C. The hash of Enum is a Python function, which would be called for each
    # lookup.
    __hash__ = object.__hash__


BEGUN: Final = frozenset({Phase.ANSWERED, Phase.READING, Phase.DONE})
"""The phases in which the client's answer has begun."""

_ANSWER: Final = frozenset({Phase.ANSWERED, Phase.DONE, Phase.CLOSED})
_DECISION: Final = frozenset({Phase.PICKED, Phase.REFUSED})

FOLLOWS: Final[Mapping[Phase, AbstractSet[Phase]]] = {
    Phase.START: {Phase.BODY, Phase.HOLDING, Phase.PASSED, *_DECISION, *_ANSWER},
    Phase.BODY: {Phase.WAITING, *_DECISION, *_ANSWER},
    Phase.HOLDING: {Phase.WAITING, *_DECISION, *_ANSWER},
    Phase.WAITING: {*_DECISION, *_ANSWER},
    Phase.PICKED: _ANSWER,
    Phase.PASSED: _ANSWER,
    Phase.REFUSED: {Phase.CLOSED},
    Phase.ANSWERED: {Phase.READING, Phase.DONE, Phase.CLOSED},
    Phase.READING: {Phase.DONE, Phase.CLOSED},
    Phase.DONE: {Phase.CLOSED},
    Phase.CLOSED: frozenset(),
}
"""The phases that may follow each phase."""
