"""The phase of one request, from its first message to its end, and which phase may follow which.

A request has one phase. Until the request goes to a server, its stream (`protocol.stream`) keeps the phase.
From then on the `Pick` keeps the phase: the stream reads it there, and `commit` and the stream change it
there. Replay, the simulator and tests begin with the pick, so their requests begin with `SENT`.

An answer may begin before the request's body has ended. The answer may even begin before the request is
picked, if the data plane itself answers. From then on the rest of the request goes on unchanged.
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
    PASSED = enum.auto()
    """The request came without its headers, so it will never be picked. The rest of the request goes on
    unchanged.
    """
    REFUSED = enum.auto()
    """The picker has answered the client itself. Nothing more is answered."""
    SENT = enum.auto()
    """The pick is made, and its server has not answered yet. The rest of the request goes on unchanged."""
    ANSWERED = enum.auto()
    """The headers of the answer came, with a pick or without."""
    READING = enum.auto()
    """Part of the answer's body came, and the answer is sampled."""
    DONE = enum.auto()
    """The answer has ended."""
    ENDED = enum.auto()
    """The request is over, and nothing is held or booked for it any more. The same is true in the next three
    phases.
    """
    ABORTED = enum.auto()
    """The request went to a server, and it ended before its answer did."""
    FAILED = enum.auto()
    """The request went to a server, which failed."""
    DETACHED = enum.auto()
    """The stream was let go on purpose while the server goes on answering."""

    # The hash is by identity, in C. The hash of Enum is a Python function, which would be called for each
    # lookup.
    __hash__ = object.__hash__


BEGUN: Final = frozenset({Phase.ANSWERED, Phase.READING, Phase.DONE})
"""The phases in which the client's answer has begun, and the request is not over."""

OVER: Final = frozenset({Phase.ENDED, Phase.ABORTED, Phase.FAILED, Phase.DETACHED})
"""The phases in which nothing is held or booked for the request any more."""

_DECISION: Final = frozenset({Phase.SENT, Phase.REFUSED})
_WITHOUT_A_PICK: Final = frozenset({Phase.ANSWERED, Phase.ENDED})

FOLLOWS: Final[Mapping[Phase, AbstractSet[Phase]]] = {
    Phase.START: {Phase.BODY, Phase.HOLDING, Phase.PASSED, *_DECISION, *_WITHOUT_A_PICK},
    Phase.BODY: {Phase.WAITING, *_DECISION, *_WITHOUT_A_PICK},
    Phase.HOLDING: {Phase.WAITING, *_DECISION, *_WITHOUT_A_PICK},
    Phase.WAITING: {*_DECISION, *_WITHOUT_A_PICK},
    Phase.PASSED: _WITHOUT_A_PICK,
    Phase.REFUSED: {Phase.ENDED},
    Phase.SENT: {Phase.ANSWERED, *OVER},
    Phase.ANSWERED: {Phase.READING, Phase.DONE, *OVER},
    Phase.READING: {Phase.DONE, *OVER},
    Phase.DONE: OVER,
    **dict.fromkeys(OVER, frozenset()),
}
"""The phases that may follow each phase."""
