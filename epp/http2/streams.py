"""The open streams of one connection: the record of a stream, flow control in both directions, and how a
stream ends. Pure; called by `connection` for each frame of a call.

A stream that was never opened is IDLE. A stream that has left the table counts as CLOSED. The server opens no
streams.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

from epp.http2 import frames
from epp.http2.call_events import Event, HalfClosed
from epp.http2.frames import Code, Flag, FrameError, Kind, pack_head, pack_message
from epp.http2.grpc_messages import Assembly, Reply
from epp.http2.headers import GRPC_RESPONSE, trailers
from epp.http2.limits import Limits

_LATELY: Final = 1_000
_SHRINK_TABLE: Final = b"\x20"
"""HPACK: sets our dynamic table to size 0. In front of our first block this is valid for any size that the
peer allows."""


class State(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()
    ANSWERING = enum.auto()
    """Half-closed (remote): the peer has sent everything, and we still send."""
    ANSWERED = enum.auto()
    """Half-closed (local): we have sent everything, and the peer has not."""
    CLOSED = enum.auto()

    __hash__ = object.__hash__


_AFTER_OUR_END: Final = {State.OPEN: State.ANSWERED, State.ANSWERING: State.CLOSED}
_AFTER_PEERS_END: Final = {State.OPEN: State.ANSWERING, State.ANSWERED: State.CLOSED}


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
        """If we refused the call: until when the peer may go on sending. These bytes are thrown away."""

    @property
    def handler_waits(self) -> bool:
        """Whether a handler has the call, and has not ended it."""
        return self.lingers_until is None and self.end is None

    def drop_assembly(self) -> None:
        if self.assembly is not None:
            self.assembly.drop()
            self.assembly = None


class Windows:
    """Our own windows: how much the peer may send.

    A window opens again as its bytes are consumed, in steps of half a window. While too much of a stream's
    answer waits for the peer's window, the bytes that the peer sends on that stream do not open ours. So a
    peer can make us hold no more than a window of its answer.
    """

    def __init__(self, limits: Limits) -> None:
        self.out: list[bytes] = []
        """The frames to be written, in the order of the wire."""
        self._backlog_bytes = limits.backlog_bytes
        self._stream_step = limits.stream_window_bytes // 2
        self._step = limits.connection_window_bytes // 2
        self.window = limits.connection_window_bytes
        """How many more bytes the peer may send on the connection."""
        self._credit = 0

    def take(self, size: int) -> None:
        """Count so many received bytes. Raises FrameError if the windows do not allow them."""
        self.window -= size
        if self.window < 0:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overrun")

    def taken_in(self, stream: Stream | None, size: int) -> None:
        """Open the window by so many bytes, which have been consumed."""
        if stream is not None:
            if stream.backlog_bytes > self._backlog_bytes:
                stream.owed += size
                return
            stream.credit += size
            if stream.credit >= self._stream_step and stream.state is not State.ANSWERING:
                self.out.append(frames.window_update(stream.number, stream.credit))
                stream.window += stream.credit
                stream.credit = 0
        self._credit += size
        if self._credit >= self._step:
            self.out.append(frames.window_update(0, self._credit))
            self.window += self._credit
            self._credit = 0

    def settle(self, stream: Stream, *, gone: bool) -> None:
        """Open the window by the bytes that were held back, if the answer has been sent far enough or the
        stream is over.
        """
        if stream.owed and (gone or stream.backlog_bytes <= self._backlog_bytes):
            owed, stream.owed = stream.owed, 0
            self.taken_in(None if gone else stream, owed)


class Streams:
    """The table of open streams, and what is sent to the peer: frames in the order of the wire, as far as the
    peer's windows and frame size allow.

    An answer that does not fit its windows waits on its stream, in order, and delays no other stream. A
    stream leaves the table only in `forget`, which releases everything that the stream held.
    """

    def __init__(self, limits: Limits, *, now: float) -> None:
        self._limits = limits
        self.windows = Windows(limits)
        self.now = now
        self.events: list[Event] = []
        """Events that wait for the connection's owner."""
        self.out = self.windows.out
        """The frames to be written, those of `windows` among them."""
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
        self.window = frames.DEFAULT_WINDOW
        """How many more bytes we may send on the connection."""
        self.initial_window = frames.DEFAULT_WINDOW
        """The window of each new stream."""
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._shrunk = False
        self._waiting: dict[int, Stream] = {}
        """Streams whose own window is open while the window of the connection is closed."""
        self._stalled: dict[int, Stream] = {}
        """Streams that wait for either window."""

    def take(self) -> bytes:
        """Return the bytes to write now. Each byte is returned once."""
        out = self.out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    def message(self, stream: Stream, data: bytes) -> None:
        """Queue one gRPC message, after the headers of the answer."""
        if not stream.answered:
            stream.answered = True
            self.send_headers(stream.number, GRPC_RESPONSE, flags=Flag.END_HEADERS)
        size = len(data)
        whole = size + 5
        if (
            stream.backlog is None
            and whole <= stream.peer_window
            and whole <= self.window
            and whole <= self.frame_bytes
        ):
            stream.peer_window -= whole
            self.window -= whole
            self.out.append(pack_message(whole >> 8, whole & 0xFF, Kind.DATA, 0, stream.number, 0, size))
            self.out.append(data)
            return
        self.queue(stream, b"\0" + size.to_bytes(4) + data)
        self.pump(stream)

    def queue(self, stream: Stream, data: bytes) -> None:
        """Let bytes of the answer wait for the windows."""
        if stream.backlog is None:
            stream.backlog = deque()
        stream.backlog.append(memoryview(data))
        stream.backlog_bytes += len(data)

    def end(self, stream: Stream, status: int, details: str) -> None:
        """End the answer with trailers, after all waiting data."""
        if stream.end is None:
            stream.end = trailers(status, details, alone=not stream.answered)
            self.pump(stream)

    def pump(self, stream: Stream) -> None:
        """Send as much of the waiting data as the windows allow."""
        finished = self._send_waiting(stream)
        self.windows.settle(stream, gone=False)
        if finished:
            self.we_ended(stream)

    def _send_waiting(self, stream: Stream) -> bool:
        """Send the waiting frames of a stream. Returns whether the answer is sent completely."""
        backlog = stream.backlog
        while backlog:
            first = backlog[0]
            size = min(len(first), self.frame_bytes, stream.peer_window, self.window)
            if size <= 0:
                if stream.peer_window > 0:
                    self._waiting[stream.number] = stream
                if stream.stalled_since is None:
                    stream.stalled_since = self.now
                    self._stalled[stream.number] = stream
                return False
            last = stream.end == b"" and size == stream.backlog_bytes
            flags = Flag.END_STREAM if last else 0
            self.out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, flags, stream.number))
            self.out.append(bytes(first[:size]))
            stream.peer_window -= size
            self.window -= size
            stream.backlog_bytes -= size
            if stream.stalled_since is not None:
                stream.stalled_since = None
                del self._stalled[stream.number]
            if size == len(first):
                backlog.popleft()
            else:
                backlog[0] = first[size:]
        stream.backlog = None
        if stream.end:
            self.send_headers(stream.number, stream.end, flags=Flag.END_HEADERS | Flag.END_STREAM)
        return stream.end is not None

    def send_headers(self, number: int, block: bytes, *, flags: int) -> None:
        if not self._shrunk:
            self._shrunk = True
            block = _SHRINK_TABLE + block
        size = len(block)
        self.out.append(pack_head(size >> 8, size & 0xFF, Kind.HEADERS, flags, number) + block)

    def widen(self, stream: Stream, more: int) -> None:
        """Called when the peer changes its window of a stream."""
        stream.peer_window += more
        if more > 0 and stream.backlog is not None:
            self.pump(stream)

    def widen_connection(self, more: int) -> None:
        """Called when the peer opens the window of the connection. The streams that have waited longest send
        first. Raises FrameError.
        """
        if not more:
            raise FrameError(Code.PROTOCOL_ERROR, "window_overflow")
        self.window += more
        if self.window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
        while self.window > 0 and self._waiting:
            self.pump(self._waiting.pop(next(iter(self._waiting))))

    def stalled(self, since: float) -> list[Stream]:
        """Return the streams whose answers have waited for a window since that time or longer."""
        return [s for s in self._stalled.values() if s.stalled_since is not None and s.stalled_since <= since]

    def peer_ended(self, stream: Stream) -> None:
        """Called when the peer has sent END_STREAM, and before it only whole messages."""
        stream.state = _AFTER_PEERS_END[stream.state]
        if stream.state is State.CLOSED:
            self.forget(stream)
        else:
            self.events.append(HalfClosed(stream.number))

    def we_ended(self, stream: Stream) -> None:
        """Ask a peer that still sends to stop, since our answer is sent, unless its call was refused."""
        stream.state = _AFTER_OUR_END[stream.state]
        if stream.state is State.ANSWERED:
            if stream.lingers_until is not None:
                return
            self.send_reset(stream.number, Code.NO_ERROR)
        self.forget(stream)

    def send_reset(self, number: int, code: Code) -> None:
        self.out.append(frames.reset(number, code))
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
        self._waiting.pop(stream.number, None)
        self._stalled.pop(stream.number, None)
        stream.backlog = None
        stream.backlog_bytes = 0
        stream.drop_assembly()
        self.windows.settle(stream, gone=True)

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
