"""One HTTP/2 connection of a gRPC server, as a pure object. It takes bytes and `now`, and returns events and
bytes to send.

This module has the steps that every call needs: the start of a call, its messages, its windows and its end.
`frames` checks the order of frames, `streams` has the open streams and the windows of both directions.
`faults`, `control_frames`, `time_limits` and `replies` do the rest. A connection knows no socket,
no clock and no service: an edge feeds it with `receive` and `tick`, acts on the events, answers with `send`
and `end`, and writes what `data_to_send` returns.

Invariants: every split of the same bytes gives the same events. Every `Opened` is followed by one `Gone`, or
by the owner's `end`. Memory is bounded by `Limits` for each stream and connection, and by `HeldBytes` for
unfinished messages of all of them. After `Over` nothing is read.
"""

from __future__ import annotations

from typing import Final

from epp.http2.call_events import Event, Fault, HalfClosed, Message, Opened, Over
from epp.http2.control_frames import ControlFrames, hello
from epp.http2.faults import Faults
from epp.http2.frames import MAX_WINDOW, Code, FrameError, FrameReader, Kind, read_u32
from epp.http2.headers import (
    HeaderReader,
    ListTooLargeError,
    MalformedRequestError,
    UnreadableBlockError,
)
from epp.http2.limits import HeldBytes, Limits
from epp.http2.messages import (
    INTERNAL,
    OK,
    PREFIX_BYTES,
    Assembly,
    BadMessageError,
    Reply,
    message_bytes,
    read_prefix,
)
from epp.http2.replies import replied
from epp.http2.streams import State, Stream, Streams
from epp.http2.time_limits import TimeLimits

ALL: Final = 2**31
_AFTER_PEERS_END: Final = {State.OPEN: State.ANSWERING, State.ANSWERED: State.CLOSED}


class Connection:
    """The server's side of one connection."""

    def __init__(self, limits: Limits, held: HeldBytes, *, now: float) -> None:
        self._limits = limits
        self._held = held
        self._read_at = now
        self._frames = FrameReader(self, limits)
        self._headers = HeaderReader(max_list_bytes=limits.max_header_bytes)
        self._table = Streams(limits, now=now)
        self._streams = self._table.by_number
        self._windows = self._table.windows
        self._faults = Faults(self._table, limits)
        self._control = ControlFrames(self._table, self._faults)
        self._times = TimeLimits(limits, self._table, self._faults, self._frames, self._control)
        self._into: Stream | None = None
        """The stream whose DATA frame is being read. None: the frame belongs to no stream and is skipped."""
        self._into_size = 0
        self._into_ends = False
        self.pending = False
        """Whether `receive` stopped at its limit and must be called again."""
        self.closing = False
        """Whether we have begun to leave, or the connection is over."""
        self._replies = False
        """Whether any stream has had a `reply`."""
        self.over = ""
        """Why the connection must be closed. Empty: it need not be closed."""
        self.data_to_send = self._table.take
        """Returns the bytes to write now. Each byte is returned once."""
        self._table.out.append(hello(limits))

    # -- for the owner ---------------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        return len(self._streams)

    @property
    def drained(self) -> bool:
        """Whether the peer knows that we leave, and no stream is open any more."""
        return self._control.left_for_good and not self._streams

    @property
    def ends(self) -> bool:
        """Whether the connection must be closed, because it is over or drained."""
        return bool(self.over) or self.drained

    def is_open(self, stream_id: int) -> bool:
        """Return whether an answer on this stream can still reach the peer."""
        return stream_id in self._streams

    def receive(self, data: bytes, *, now: float, limit: int = ALL) -> list[Event]:
        """Read received bytes, at most `limit` frames. The rest stays for the next call."""
        if not self.over:
            self._table.now = self._read_at = now
            if self._replies and self._frames.between_frames:
                rest = replied(data, self._table, self._limits)
                if rest == len(data):
                    return []
                data = data[rest:]
            try:
                self._frames.read(data, limit=limit, now=now)
            except FrameError as error:
                self._fail(error.code, error.reason)
            self.pending = self._frames.pending
        return self._taken()

    def send(self, stream_id: int, message: bytes) -> None:
        """Send one message of the answer. Does nothing if the stream is gone."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.end is None:
            self._table.message(stream, message)

    def end(self, stream_id: int, status: int = OK, details: str = "") -> None:
        """End the call. Does nothing if the stream is gone."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._table.end(stream, status, details)

    def reply(self, stream_id: int, reply: Reply) -> None:
        """Answer the next messages by `reply`, without events, as long as they come in whole frames and
        `reply` has an answer. Does nothing if the stream is gone.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and stream.answered and stream.declared is None:
            stream.reply, self._replies = reply, True

    def leave(self, *, now: float) -> None:
        """Ask the peer to open no more streams. Once the peer has seen this, later streams are refused
        without another call.
        """
        self._table.now, self.closing = now, True
        if not self.over:
            self._control.leave()

    def close(self, *, now: float) -> list[Event]:
        """Close at once. The open streams are gone."""
        self._table.now = now
        if not self.over:
            self._fail(Code.NO_ERROR, "closed")
        return self._taken()

    def tick(self, *, now: float) -> list[Event]:
        """Check all time limits. To be called a few times a second."""
        if not self.over:
            self._table.now = now
            try:
                self._times.check(read_at=self._read_at)
            except FrameError as error:
                self._fail(error.code, error.reason)
        return self._taken()

    def check_integrity(self) -> None:
        assert self._windows.window <= self._limits.connection_window_bytes
        self._table.check_integrity()
        assert not (self.over and self._streams)

    def _taken(self) -> list[Event]:
        """Take the events out of the table, since a body must not stay in memory until the next event."""
        events = self._table.events
        if events:
            self._table.events = []
        return events

    # -- frames, as `FrameReader` passes them on -------------------------------------------------------------

    def data(self, number: int, data: bytes, at: int, end: int, *, ends: bool) -> None:
        stream = self._streams.get(number)
        start, size = at + PREFIX_BYTES, end - at
        if (
            stream is not None
            and stream.state is State.OPEN
            and stream.declared is None
            and stream.end is None
            and not ends
            and size <= stream.window
        ):
            message: bytes | None = None
            assembly = stream.assembly
            if assembly is not None:  # The next part of a long message.
                taken = assembly.takes(size)
                if taken:
                    message = assembly.with_part(data[at:end])
            else:  # Nearly every frame is one whole message.
                taken = (
                    size >= PREFIX_BYTES
                    and read_prefix(data, at) == (0, size - PREFIX_BYTES)
                    and size <= self._limits.max_message_bytes
                )
                if taken:
                    message = data[start:end]
            if taken:
                self._windows.take(size)
                stream.window -= size
                if message is not None:
                    stream.assembly = stream.reply = None
                    self._table.events.append(Message(number, message))
                self._windows.taken_in(stream, size)
                return
        self.data_begins(number, size, padding=0, ends=ends)
        if size:
            self.data_part(data, at, end)
        self.data_ends()

    def data_begins(self, number: int, size: int, *, padding: int, ends: bool) -> None:
        self._windows.take(size)
        stream = self._streams.get(number)
        if stream is None or stream.state is State.ANSWERING:
            self._faults.unexpected(number, Kind.DATA)
            stream = None
        elif size > stream.window:
            self._faults.reset(stream, Code.FLOW_CONTROL_ERROR, "window_overrun")
            stream = None
        else:
            stream.window -= size
            if stream.declared is not None:
                stream.declared -= size - padding
                if stream.declared < 0 or (stream.declared and ends):
                    self._faults.reset(stream, Code.PROTOCOL_ERROR, "content_length")
                    stream = None
        if not size and not ends:
            self._faults.too_many("empty_frame_flood")
        self._into, self._into_size, self._into_ends = stream, size, ends

    def data_part(self, data: bytes, at: int, end: int) -> None:
        """Add a part of a DATA frame, and report the gRPC messages that it completes."""
        stream = self._into
        if stream is None or stream.end is not None or stream.state is State.CLOSED:
            return
        stream.reply = None
        most = self._limits.max_message_bytes
        try:
            while at < end:
                assembly = stream.assembly
                if assembly is None:
                    if end - at >= PREFIX_BYTES:
                        start = at + PREFIX_BYTES
                        stop = start + message_bytes(data, at, max_bytes=most)
                        if stop <= end:
                            self._table.events.append(Message(stream.number, data[start:stop]))
                            at = stop
                            continue
                    assembly = stream.assembly = Assembly(self._held)
                at = assembly.take(data, at, end, max_bytes=most)
                message = assembly.whole()
                if message is not None:
                    stream.assembly = None
                    self._table.events.append(Message(stream.number, message))
        except BadMessageError as error:
            self._faults.give_up(stream, error.status, error.details, reason=error.reason)

    def data_ends(self) -> None:
        stream, self._into = self._into, None
        gone = stream is None or stream.state is State.CLOSED
        if self._into_ends and stream is not None and not gone:
            self._peer_ended(stream)
        self._windows.taken_in(None if gone else stream, self._into_size)

    def header_block(self, number: int, block: bytes, *, ends: bool, depends_on_itself: bool) -> None:
        if not number % 2:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        try:
            if number > self._table.last_id:
                self._open(number, block, ends=ends, depends_on_itself=depends_on_itself)
            else:
                self._on_trailers(number, block, ends=ends)
        except ListTooLargeError as too_large:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large") from too_large
        except UnreadableBlockError as unreadable:
            raise FrameError(Code.COMPRESSION_ERROR, "unreadable_headers") from unreadable
        except MalformedRequestError:
            self._faults.stream_error(number, Code.PROTOCOL_ERROR, "malformed_headers")

    # -- effects of the frames -------------------------------------------------------------------------------

    def _open(self, number: int, block: bytes, *, ends: bool, depends_on_itself: bool) -> None:
        before, self._table.last_id = self._table.last_id, number
        request = self._headers.known.get(block) or self._headers.request(block)
        if depends_on_itself or (ends and request.declared_bytes):
            raise MalformedRequestError
        if self._control.left_for_good or len(self._streams) >= self._limits.max_streams:
            self._table.last_id = before if self._control.left_for_good else number
            self._faults.stream_error(number, Code.REFUSED_STREAM, "too_many_streams")
            return
        stream = self._streams[number] = Stream(
            number, window=self._limits.stream_window_bytes, peer_window=self._table.initial_window
        )
        stream.declared = request.declared_bytes
        if ends:
            stream.state = State.ANSWERING
        if request.refuse_status:
            self._faults.refuse(stream, request.refuse_status)
            return
        self._table.events.append(Opened(number, request))
        if request.bad_timeout:
            self._faults.give_up(stream, INTERNAL, "grpc-timeout cannot be read", reason="bad_timeout")
            return
        if request.timeout_s is not None:
            stream.deadline = self._table.now + request.timeout_s
            self._table.timed[number] = stream
        if ends:
            self._table.events.append(HalfClosed(number))

    def _on_trailers(self, number: int, block: bytes, *, ends: bool) -> None:
        stream = self._streams.get(number)
        if stream is None or stream.state is State.ANSWERING:
            self._faults.unexpected(number, Kind.HEADERS)
            self._headers.skip(block)
            return
        self._headers.trailers(block)
        if not ends:
            self._faults.reset(stream, Code.PROTOCOL_ERROR, "second_headers")
        elif stream.declared:
            self._faults.reset(stream, Code.PROTOCOL_ERROR, "content_length")
        else:
            self._peer_ended(stream)

    def _peer_ended(self, stream: Stream) -> None:
        """Called when the peer has sent END_STREAM and everything before it."""
        if stream.assembly is not None:
            self._faults.give_up(stream, INTERNAL, "the stream ended within a message", reason="cut_message")
            return
        stream.state = _AFTER_PEERS_END[stream.state]
        if stream.state is State.CLOSED:
            self._table.forget(stream)
        else:
            self._table.events.append(HalfClosed(stream.number))

    def frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind != Kind.WINDOW_UPDATE or len(payload) != 4:
            self._control.receive(kind, flags, number, payload)
            return
        more = read_u32(payload)[0] & MAX_WINDOW
        if not number:
            self._widen_connection(more)
            return
        stream = self._streams.get(number)
        if stream is None:
            self._faults.unexpected(number, Kind.WINDOW_UPDATE)
        elif not more:
            self._faults.reset(stream, Code.PROTOCOL_ERROR, "window_overflow")
        elif stream.peer_window + more > MAX_WINDOW:
            self._faults.reset(stream, Code.FLOW_CONTROL_ERROR, "window_overflow")
        else:
            self._table.widen(stream, more)

    def _widen_connection(self, more: int) -> None:
        if not more:
            raise FrameError(Code.PROTOCOL_ERROR, "window_overflow")
        self._table.window += more
        if self._table.window > MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
        while (stream := self._table.next_waiting()) is not None:
            self._table.pump(stream)

    def _fail(self, code: Code, reason: str) -> None:
        """End the connection."""
        self.over, self.closing = reason, True
        self._frames.drop()
        self.pending = False
        self._faults.fail(code, reason)
        if reason != "closed":
            self._table.events.append(Fault(reason))
        self._table.events.append(Over(reason))
