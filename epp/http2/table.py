"""The open streams of one connection: how each is answered, ended or reset, and what is remembered
afterwards.

Owns the table, the events that wait for the owner, and the buckets. `connection` calls it for each frame. A
stream leaves the table only in `forget`, which releases everything that the stream held. Pure.
"""

from __future__ import annotations

from typing import Final

from epp.http2 import frames, headers
from epp.http2.call_events import Event, Fault, Gone
from epp.http2.flow_control import Sender, Windows
from epp.http2.frame_reader import FrameError
from epp.http2.frames import Code
from epp.http2.limits import Floods, Limits
from epp.http2.messages import DEADLINE_EXCEEDED
from epp.http2.streams import AFTER_OUR_END, FRAME_NAMES, RECEIVED, Bad, State, Stream

_LATELY: Final = 1_000


class StreamTable:
    def __init__(self, limits: Limits, sender: Sender, windows: Windows, *, now: float) -> None:
        self._limits = limits
        self._sender = sender
        self._windows = windows
        self._floods = Floods()
        self.now = now
        self.events: list[Event] = []
        self.streams: dict[int, Stream] = {}
        """Open streams by number."""
        self.timed: dict[int, Stream] = {}
        """Streams whose callers have set a time limit."""
        self.lingering: dict[int, Stream] = {}
        """Refused streams whose peers have not ended them yet."""
        self.lately: dict[int, None] = {}
        """Streams that we reset a short time ago. Frames that the peer sent before it knew of the reset are
        ignored."""
        self.last_id = 0
        """The highest stream number that the peer has used."""

    def end(self, stream: Stream, status: int, details: str) -> None:
        """End the answer with trailers, after all waiting data."""
        if stream.end is None:
            block = headers.trailers(status, details, alone=not stream.answered)
            if self._sender.end(stream, block, now=self.now):
                self.we_ended(stream)

    def check_integrity(self) -> None:
        for number, stream in self.streams.items():
            assert number == stream.number <= self.last_id
            assert stream.state not in (State.IDLE, State.CLOSED)
            assert 0 <= stream.window <= self._limits.stream_window_bytes
            assert stream.backlog_bytes == sum(map(len, stream.backlog or ()))
            assert stream.end is None or stream.backlog or stream.lingers_until is not None
            assert not stream.owed or stream.backlog_bytes
        assert self.timed.keys() | self.lingering.keys() <= self.streams.keys()
        assert len(self.lately) <= _LATELY

    def unexpected(self, number: int, kind: int) -> None:
        """Handle a frame on a stream that is not open for it, by the table of states."""
        stream = self.streams.get(number)
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
        """The peer changes its window of a stream. whole: it did so by its settings, so an overflow is an
        error of the connection.
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
        stream = self.streams.get(number)
        if stream is not None:
            self.reset(stream, code, reason)
            return
        self.too_many("stream_error_flood")
        self.events.append(Fault(reason))
        self._sender.control(frames.reset(number, code))
        self.remember_reset(number)

    def reset(self, stream: Stream, code: Code, reason: str) -> None:
        told = stream.lingers_until is None and stream.end is None
        self.forget(stream)
        try:
            self.stream_error(stream.number, code, reason)
        finally:  # The owner gets its event even if this was one fault too many.
            if told:
                self.events.append(Gone(stream.number, reason))

    def remember_reset(self, number: int) -> None:
        if len(self.lately) >= _LATELY:
            del self.lately[next(iter(self.lately))]
        self.lately[number] = None

    def forget(self, stream: Stream) -> None:
        stream.state = State.CLOSED
        self.streams.pop(stream.number, None)
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
