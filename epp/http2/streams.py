"""The open streams of one connection: the states of a stream as a table (RFC 9113, section 5.1), how each
stream is answered, ended or reset, and the effect of the frames that carry no part of a call.

Owns the table of streams, the events that wait for the owner, the buckets, and what the peer knows of us:
whether it has acknowledged our settings, and how far it knows that we leave. `connection` calls it for each
frame. A stream that was never opened is IDLE. A stream leaves the table only in `forget`, which releases
everything that the stream held, and counts as CLOSED from then on. The server opens no streams. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from epp.http2 import frames, headers
from epp.http2.call_events import Event, Fault, Gone
from epp.http2.flow_control import Sender, State, Stream, Windows
from epp.http2.frames import Code, Flag, FrameError, Kind, Setting
from epp.http2.limits import Floods, Limits
from epp.http2.messages import DEADLINE_EXCEEDED

_LATELY: Final = 1_000
_DRAINING: Final = b"draining"
_FRAME_BYTES: Final = {Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = frozenset((Kind.SETTINGS, Kind.PING, Kind.GOAWAY))


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


class Streams:
    """See the module's docstring. Every method that handles a frame may raise FrameError."""

    def __init__(self, limits: Limits, sender: Sender, windows: Windows, *, now: float) -> None:
        self._limits = limits
        self._sender = sender
        self._windows = windows
        self._floods = Floods()
        self.now = now
        self.events: list[Event] = []
        self.by_number: dict[int, Stream] = {}
        self.timed: dict[int, Stream] = {}
        """Streams whose callers have set a time limit."""
        self.lingering: dict[int, Stream] = {}
        """Refused streams whose peers have not ended them yet."""
        self.lately: dict[int, None] = {}
        """Streams that we reset a short time ago. Frames that the peer sent before it knew of the reset are
        ignored."""
        self.last_id = 0
        """The highest stream number that the peer has used."""
        self.settings_acked = False
        """The peer has acknowledged our settings."""
        self.leaving = False
        """The peer was asked to open no more streams."""
        self.left_for_good = False
        """The peer knows that streams which it opens from now on are refused."""

    def end(self, stream: Stream, status: int, details: str) -> None:
        """End the answer with trailers, after all waiting data."""
        if stream.end is None:
            block = headers.trailers(status, details, alone=not stream.answered)
            if self._sender.end(stream, block, now=self.now):
                self.we_ended(stream)

    def check_integrity(self) -> None:
        for number, stream in self.by_number.items():
            assert number == stream.number <= self.last_id
            assert stream.state not in (State.IDLE, State.CLOSED)
            assert 0 <= stream.window <= self._limits.stream_window_bytes
            assert stream.backlog_bytes == sum(map(len, stream.backlog or ()))
            assert stream.end is None or stream.backlog or stream.lingers_until is not None
            assert not stream.owed or stream.backlog_bytes
        assert self.timed.keys() | self.lingering.keys() <= self.by_number.keys()
        assert len(self.lately) <= _LATELY

    def unexpected(self, number: int, kind: int) -> None:
        """Handle a frame on a stream that is not open for it, by the table of states."""
        stream = self.by_number.get(number)
        if stream is not None:
            state = stream.state
        else:  # Streams with even numbers are ours to open, and we open none.
            state = State.CLOSED if number % 2 and number <= self.last_id else State.IDLE
        verdict = RECEIVED[state, kind]
        if not isinstance(verdict, Bad) or number in self.lately:
            return
        reason = f"{FRAME_NAMES[kind]}_when_{state.name.lower()}"
        if verdict.whole:
            raise FrameError(verdict.code, reason)
        self.stream_error(number, verdict.code, reason)

    def widen(self, stream: Stream, more: int, *, whole: bool) -> None:
        """Called when the peer changes its window of a stream. whole: it did so by its settings, so an
        overflow is an error of the connection.
        """
        stream.peer_window += more
        if stream.peer_window > frames.MAX_WINDOW:
            if whole:
                raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
            self.reset(stream, Code.FLOW_CONTROL_ERROR, "window_overflow")
        elif more > 0 and stream.backlog is not None:
            self.pump(stream)

    def pump(self, stream: Stream) -> None:
        finished = self._sender.pump(stream, now=self.now)
        self._windows.settle(stream, gone=False)
        if finished:
            self.we_ended(stream)

    def we_ended(self, stream: Stream) -> None:
        """Our answer is sent. A peer that still sends is asked to stop, unless its call was refused."""
        stream.state = AFTER_OUR_END[stream.state]
        if stream.state is State.ANSWERED:
            if stream.lingers_until is not None:
                return
            self._sender.control(frames.reset(stream.number, Code.NO_ERROR))
            self.remember_reset(stream.number)
        self.forget(stream)

    def give_up(self, stream: Stream, status: int, details: str, *, reason: str) -> None:
        """End a call for a reason that its service does not know."""
        self.too_many("stream_error_flood")
        self.events.append(Fault(reason))
        self.events.append(Gone(stream.number, reason))
        self._drop_assembly(stream)
        self.end(stream, status, details)

    def stream_error(self, number: int, code: Code, reason: str) -> None:
        stream = self.by_number.get(number)
        if stream is not None:
            self.reset(stream, code, reason)
            return
        self.too_many("stream_error_flood")
        self.events.append(Fault(reason))
        self._sender.control(frames.reset(number, code))
        self.remember_reset(number)

    def reset(self, stream: Stream, code: Code, reason: str) -> None:
        handler_waits = stream.lingers_until is None and stream.end is None
        self.forget(stream)
        try:
            self.stream_error(stream.number, code, reason)
        finally:  # The owner gets its event even if this was one fault too many.
            if handler_waits:
                self.events.append(Gone(stream.number, reason))

    def remember_reset(self, number: int) -> None:
        if len(self.lately) >= _LATELY:
            del self.lately[next(iter(self.lately))]
        self.lately[number] = None

    def forget(self, stream: Stream) -> None:
        stream.state = State.CLOSED
        self.by_number.pop(stream.number, None)
        if stream.deadline is not None:
            self.timed.pop(stream.number, None)
        if stream.lingers_until is not None:
            self.lingering.pop(stream.number, None)
        self._sender.forget(stream)
        self._drop_assembly(stream)
        self._windows.settle(stream, gone=True)

    def _drop_assembly(self, stream: Stream) -> None:
        if stream.assembly is not None:
            stream.assembly.drop()
            stream.assembly = None

    def too_many(self, what: str) -> None:
        if self._floods.too_many(what, now=self.now):
            raise FrameError(Code.ENHANCE_YOUR_CALM, what)

    def check_time(self, now: float) -> None:
        for stream in [s for s in self.timed.values() if s.deadline is not None and s.deadline <= now]:
            del self.timed[stream.number]
            stream.deadline = None
            if stream.end is None:
                self.events.append(Gone(stream.number, "deadline"))
                self.end(stream, DEADLINE_EXCEEDED, "the call's time is over")
        for stream in [s for s in self.lingering.values() if s.lingers_until and s.lingers_until <= now]:
            self._sender.control(frames.reset(stream.number, Code.NO_ERROR))
            self.remember_reset(stream.number)
            self.forget(stream)
        late = now - self._limits.stalled_s
        for stream in self._sender.stalled(late):
            self.reset(stream, Code.CANCEL, "window_never_opened")

    def leave(self) -> None:
        """Ask the peer to open no more streams. Idempotent."""
        if not self.leaving:
            self.leaving = True
            self._sender.control(frames.goaway(frames.MAX_STREAM_ID, Code.NO_ERROR))
            self._sender.control(frames.frame(Kind.PING, _DRAINING))

    # -- frames that carry no part of a call --------------------------------------------------------------

    def frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind in _OF_THE_CONNECTION and number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != _FRAME_BYTES.get(kind, len(payload)):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        if kind == Kind.WINDOW_UPDATE:
            self._on_window_update(number, frames.read_u32(payload)[0] & 0x7FFFFFFF)
        elif kind == Kind.RST_STREAM:
            self._on_reset(number)
        elif kind == Kind.PING:
            self._on_ping(flags, payload)
        elif kind == Kind.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == Kind.PRIORITY:
            self._on_priority(number, payload)
        elif kind == Kind.GOAWAY:
            self._on_goaway(payload)
        elif kind == Kind.PUSH_PROMISE:
            raise FrameError(Code.PROTOCOL_ERROR, "push_promise")
        else:
            self.too_many("unneeded_frame_flood")

    def _on_priority(self, number: int, payload: bytes) -> None:
        self.too_many("unneeded_frame_flood")
        if not number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != 5:
            self.stream_error(number, Code.FRAME_SIZE_ERROR, "bad_frame_size")
        elif frames.read_u32(payload)[0] & 0x7FFFFFFF == number:
            self.stream_error(number, Code.PROTOCOL_ERROR, "depends_on_itself")

    def _on_reset(self, number: int) -> None:
        stream = self.by_number.get(number)
        if stream is None:
            self.unexpected(number, Kind.RST_STREAM)
            return
        if not stream.answered:
            self.too_many("rapid_reset")
        handler_waits = stream.lingers_until is None and stream.end is None
        self.forget(stream)
        if handler_waits:
            self.events.append(Gone(number, "reset"))

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & Flag.ACK and payload):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        self.too_many("settings_flood")
        if flags & Flag.ACK:
            self.settings_acked = True
            return
        values = dict(frames.read_setting(payload, at) for at in range(0, len(payload), 6))
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._sender.frame_bytes)
        if not frames.DEFAULT_FRAME_BYTES <= frame_bytes <= frames.MAX_FRAME_BYTES:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        self._sender.frame_bytes = frame_bytes
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self._sender.initial_window)
        if window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "bad_setting")
        self._sender.control(frames.SETTINGS_ACK)
        more, self._sender.initial_window = window - self._sender.initial_window, window
        if more:
            for stream in list(self.by_number.values()):
                self.widen(stream, more, whole=True)

    def _on_ping(self, flags: int, payload: bytes) -> None:
        self.too_many("ping_flood")
        if not flags & Flag.ACK:
            self._sender.control(frames.frame(Kind.PING, payload, flags=Flag.ACK))
        elif payload == _DRAINING and self.leaving and not self.left_for_good:
            # Second step: streams that the peer opens from now on are refused.
            self.left_for_good = True
            self._sender.control(frames.goaway(self.last_id, Code.NO_ERROR))

    def _on_goaway(self, payload: bytes) -> None:
        """Called when the peer opens no more streams. Its open streams continue."""
        self.too_many("unneeded_frame_flood")
        if len(payload) < 8:
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")

    def _on_window_update(self, number: int, more: int) -> None:
        if number:
            stream = self.by_number.get(number)
            if stream is None:
                self.unexpected(number, Kind.WINDOW_UPDATE)
            elif not more:
                self.reset(stream, Code.PROTOCOL_ERROR, "window_overflow")
            else:
                self.widen(stream, more, whole=False)
            return
        if not more:
            raise FrameError(Code.PROTOCOL_ERROR, "window_overflow")
        self._sender.window += more
        if self._sender.window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
        while (stream := self._sender.next_waiting()) is not None:
            self.pump(stream)
