"""The states of a stream, as a table (RFC 9113, section 5.1), and the record of an open stream.

A stream that was never opened is IDLE. A stream that has ended is forgotten and counts as CLOSED. The server
opens no streams. Pure; called by `connection`, `table` and `flow_control`.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Final

from epp.http2.frames import Code, Kind
from epp.http2.messages import Assembly


class State(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()
    ANSWERING = enum.auto()
    """Half-closed (remote): the peer has sent all, our answer goes on."""
    ANSWERED = enum.auto()
    """Half-closed (local): we have sent all, the peer has not."""
    CLOSED = enum.auto()

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Bad:
    """A frame that must not come now: an error of the stream, or of the whole connection."""

    code: Code
    whole: bool


IGNORE: Final = "ignore"
TAKE: Final = "take"

_STREAM_CLOSED: Final = Bad(Code.STREAM_CLOSED, whole=False)
_TOO_LATE: Final = Bad(Code.STREAM_CLOSED, whole=True)
_TOO_EARLY: Final = Bad(Code.PROTOCOL_ERROR, whole=True)

RECEIVED: Final[dict[tuple[State, int], Bad | str]] = {
    (State.IDLE, Kind.HEADERS): TAKE,
    (State.IDLE, Kind.DATA): _TOO_EARLY,
    (State.IDLE, Kind.RST_STREAM): _TOO_EARLY,
    (State.IDLE, Kind.WINDOW_UPDATE): _TOO_EARLY,
    (State.OPEN, Kind.HEADERS): TAKE,  # trailers
    (State.OPEN, Kind.DATA): TAKE,
    (State.OPEN, Kind.RST_STREAM): TAKE,
    (State.OPEN, Kind.WINDOW_UPDATE): TAKE,
    (State.ANSWERING, Kind.HEADERS): _STREAM_CLOSED,
    (State.ANSWERING, Kind.DATA): _STREAM_CLOSED,
    (State.ANSWERING, Kind.RST_STREAM): TAKE,
    (State.ANSWERING, Kind.WINDOW_UPDATE): TAKE,
    (State.ANSWERED, Kind.HEADERS): TAKE,
    (State.ANSWERED, Kind.DATA): TAKE,
    (State.ANSWERED, Kind.RST_STREAM): TAKE,
    (State.ANSWERED, Kind.WINDOW_UPDATE): IGNORE,
    (State.CLOSED, Kind.HEADERS): _TOO_LATE,
    (State.CLOSED, Kind.DATA): _STREAM_CLOSED,
    (State.CLOSED, Kind.RST_STREAM): IGNORE,
    (State.CLOSED, Kind.WINDOW_UPDATE): IGNORE,
}
"""What to do with a frame that comes in a state. PRIORITY may come in any."""

FRAME_NAMES: Final = {
    Kind.DATA: "data",
    Kind.HEADERS: "headers",
    Kind.RST_STREAM: "rst_stream",
    Kind.WINDOW_UPDATE: "window_update",
}

AFTER_PEERS_END: Final = {State.OPEN: State.ANSWERING, State.ANSWERED: State.CLOSED}
AFTER_OUR_END: Final = {State.OPEN: State.ANSWERED, State.ANSWERING: State.CLOSED}


class Stream:
    """One open stream. Windows are in bytes and may be negative where the peer has shrunk its own."""

    __slots__ = (
        "answered", "assembly", "backlog", "backlog_bytes", "credit", "deadline", "declared", "end", "lingers_until",
        "number", "owed", "peer_window", "stalled_since", "state", "window",
    )  # fmt: skip

    def __init__(self, number: int, *, window: int, peer_window: int) -> None:
        self.number = number
        self.state = State.OPEN
        self.window = window
        """What the peer may still send."""
        self.credit = 0
        """What was consumed, and may be told to the peer."""
        self.owed = 0
        """What was consumed while too much of our answer waited; becomes credit when the answer is gone."""
        self.peer_window = peer_window
        """What we may still send."""
        self.assembly: Assembly | None = None
        """The message that has begun and not ended; None: none has."""
        self.backlog: deque[memoryview] | None = None
        """What waits for the peer's window."""
        self.backlog_bytes = 0
        self.end: bytes | None = None
        """The trailers' block, to be sent after the backlog; empty: the backlog's last frame is the end."""
        self.answered = False
        """Our headers are sent."""
        self.deadline: float | None = None
        self.declared: int | None = None
        """Bytes that must still come by Content-Length; None: any number."""
        self.stalled_since: float | None = None
        self.lingers_until: float | None = None
        """We refused the call; whatever it sends is thrown away until then."""
