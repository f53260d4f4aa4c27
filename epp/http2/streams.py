"""The states of a stream, as a table (RFC 9113, section 5.1), and the record of an open stream.

A stream that was never opened is IDLE. A stream that has ended is forgotten and counts as CLOSED. The server
opens no streams. Pure; called by `connection`, `table` and `flow_control`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from epp.http2.frames import Code, Kind
from epp.http2.messages import Assembly


class State(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()
    ANSWERING = enum.auto()
    """Half-closed (remote): the peer has sent everything, and we still send."""
    ANSWERED = enum.auto()
    """Half-closed (local): we have sent everything, and the peer has not."""
    CLOSED = enum.auto()

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Bad:
    """A frame that this state does not allow: an error of the stream, or of the connection (`whole`)."""

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
"""What to do with a frame in each state. PRIORITY is allowed in any state."""

FRAME_NAMES: Final = {
    Kind.DATA: "data",
    Kind.HEADERS: "headers",
    Kind.RST_STREAM: "rst_stream",
    Kind.WINDOW_UPDATE: "window_update",
}

AFTER_PEERS_END: Final = {State.OPEN: State.ANSWERING, State.ANSWERED: State.CLOSED}
AFTER_OUR_END: Final = {State.OPEN: State.ANSWERED, State.ANSWERING: State.CLOSED}


Reply = Callable[[bytes, int, int], bytes | None]
"""The answer to the messages in `data[at:end]`, both with gRPC's heads. None: the owner must see them."""


class Stream:
    """One open stream. Windows are in bytes. They may be negative if the peer has reduced its own."""

    __slots__ = (
        "answered", "assembly", "backlog", "backlog_bytes", "credit", "deadline", "declared", "end", "lingers_until",
        "number", "owed", "peer_window", "reply", "stalled_since", "state", "window",
    )  # fmt: skip

    def __init__(self, number: int, *, window: int, peer_window: int) -> None:
        self.number = number
        self.state = State.OPEN
        self.window = window
        """How many more bytes the peer may send."""
        self.credit = 0
        """Consumed bytes that the next WINDOW_UPDATE will report to the peer."""
        self.owed = 0
        """Bytes consumed while too much of our answer waited. They become credit when the answer is sent."""
        self.peer_window = peer_window
        """How many more bytes we may send."""
        self.assembly: Assembly | None = None
        """The unfinished message. None: there is none."""
        self.backlog: deque[memoryview] | None = None
        """Frames that wait for the peer's window."""
        self.backlog_bytes = 0
        self.end: bytes | None = None
        """The header block of the trailers, to be sent after the backlog. Empty: the last frame of the
        backlog ends the stream."""
        self.answered = False
        """Whether our response headers are sent."""
        self.reply: Reply | None = None
        """Answers whole messages without an event. Is None again after each event, so that answers keep the
        order of the messages."""
        self.deadline: float | None = None
        self.declared: int | None = None
        """Bytes still to come by Content-Length. None: any number."""
        self.stalled_since: float | None = None
        self.lingers_until: float | None = None
        """Set if we refused the call. Everything that the peer sends until then is thrown away."""
