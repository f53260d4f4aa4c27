"""The open streams of one connection: the record of a stream, flow control in both directions, and how a
stream ends. Pure; called by `connection` for each frame of a call.

A stream that has left the table counts as CLOSED. The server opens no streams.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from itertools import takewhile
from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.frames import Code, Flag, FrameError, Kind, Limits, pack_head
from epp.transport.http2.grpc_messages import (
    Assembly,
    Event,
    Gone,
    HalfClosed,
    HeldBytes,
    Holder,
    Reply,
    pack_prefix,
)
from epp.transport.http2.headers import GRPC_RESPONSE, trailers

_LATELY: Final = 1_000
_SHRINK_TABLE: Final = b"\x20"
"""HPACK: sets our dynamic table to size 0. In front of our first block this is valid for any size that the
peer allows."""


class State(enum.Enum):
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
        "answered", "assembly", "backlog", "credit", "declared", "end", "lingers_until", "number",
        "owed", "peer_credit", "reply", "stalled_since", "state", "window",
    )  # fmt: skip

    def __init__(self, number: int, *, window: int) -> None:
        self.number = number
        self.state = State.OPEN
        self.window = window
        """How many more bytes the peer may send."""
        self.credit = 0
        """Consumed bytes that the next WINDOW_UPDATE will report to the peer."""
        self.owed = 0
        """Bytes consumed while too much of our answer waited. They become credit when the answer is sent."""
        self.peer_credit = 0
        """How many more bytes we may send, besides the peer's initial window. The peer may change this window
        for all streams at once."""
        self.assembly: Assembly | None = None
        """The unfinished message. None: there is none."""
        self.backlog: bytearray | None = None
        """Bytes that wait for the peer's window. None: there are none."""
        self.end: bytes | None = None
        """The header block of the trailers, to be sent after the backlog. Empty: the last frame of the
        backlog ends the stream."""
        self.answered = False
        """Whether our response headers are sent."""
        self.reply: Reply | None = None
        """Answers whole messages without an event. Is None again after each event, so that answers keep the
        order of the messages."""
        self.declared: int | None = None
        """Bytes still to come by Content-Length. None: any number."""
        self.stalled_since: float | None = None
        self.lingers_until: float | None = None
        """If we refused the call: until when the peer may go on sending. These bytes are thrown away."""

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
        self._most_unsent = limits.all_backlogs_bytes
        self.unsent = 0
        """Bytes of all answers that wait for the peer's windows."""
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
            if stream.backlog is not None and len(stream.backlog) > self._backlog_bytes:
                stream.owed += size
                return
            stream.credit += size
            if stream.credit >= self._stream_step and stream.state is not State.ANSWERING:
                self.out.append(frames.window_update(stream.number, stream.credit))
                stream.window += stream.credit
                stream.credit = 0
        self._credit += size
        self._open()

    def settle(self, stream: Stream, *, gone: bool) -> None:
        """Open the windows by the bytes that were held back, if the answers have been sent far enough or the
        stream is over.
        """
        if stream.owed and (gone or len(stream.backlog or b"") <= self._backlog_bytes):
            owed, stream.owed = stream.owed, 0
            self.taken_in(None if gone else stream, owed)
        self._open()

    def _open(self) -> None:
        if self._credit >= self._step and self.unsent <= self._most_unsent:
            self.out.append(frames.window_update(0, self._credit))
            self.window += self._credit
            self._credit = 0


class StreamTable:
    """The table of open streams, and what is sent to the peer: frames in the order of the wire, as far as the
    peer's windows and frame size allow.

    An answer that does not fit its windows waits on its stream, in order, and delays no other stream. A
    stream leaves the table only in `forget`, which releases everything that the stream held.
    """

    def __init__(self, limits: Limits, held: HeldBytes, *, now: float) -> None:
        self._limits = limits
        self._held = held
        self.windows = Windows(limits)
        self.now = now
        self.steps = 0
        """How many more steps may be taken before the owner looks at the clock. Frames, messages and answers
        that are sent on count as steps, and parts of dear frames do, too."""
        self.events: list[Event] = []
        """Events that wait for the connection's owner."""
        self.out = self.windows.out
        """The frames to be written, those of `windows` among them."""
        self.by_number: dict[int, Stream] = {}
        self.lingering: dict[int, Stream] = {}
        """Refused streams whose peers have not ended them yet."""
        self.unfinished = Holder()
        self.lately: dict[int, None] = {}
        """Streams that we reset a short time ago. Frames that the peer sent before it knew of the reset are
        ignored."""
        self.last_id = 0
        """The highest stream number that the peer has used."""
        self.window = frames.DEFAULT_WINDOW
        """How many more bytes we may send on the connection."""
        self.initial_window = frames.DEFAULT_WINDOW
        """The peer's window of each new stream."""
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._shrunk = False
        self._waiting: OrderedDict[int, Stream] = OrderedDict()
        """Streams that wait for the window of the connection, or for their turn to send."""
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
        framed = pack_prefix(0, len(data)) + data
        if not self.send_whole(stream, framed):
            self.queue(stream, framed)

    def send_whole(self, stream: Stream, data: bytes) -> bool:
        """Queue whole messages, with their heads, in one frame. False: a window or the frame is too small."""
        size = len(data)
        if (
            stream.backlog is not None
            or size > stream.peer_credit + self.initial_window
            or size > self.window
            or size > self.frame_bytes
        ):
            return False
        stream.peer_credit -= size
        self.window -= size
        self.out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, 0, stream.number))
        self.out.append(data)
        return True

    def queue(self, stream: Stream, data: bytes) -> None:
        """Send bytes of the answer, or let them wait for the windows."""
        if stream.backlog is None:
            stream.backlog = bytearray()
        stream.backlog += data
        self._wait(len(data))
        if stream.stalled_since is None:
            self.pump(stream)

    def _wait(self, more: int) -> None:
        """Count bytes that begin or cease to wait for the peer's windows."""
        self.windows.unsent += more
        self._held.unsent += more

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
        """Send the waiting bytes of a stream. Returns whether the answer is sent completely."""
        backlog = stream.backlog
        while backlog:
            window = stream.peer_credit + self.initial_window
            size = min(len(backlog), self.frame_bytes, window, self.window)
            if size <= 0:
                if window > 0:
                    self._waiting[stream.number] = stream
                if stream.stalled_since is None:
                    stream.stalled_since = self.now
                    self._stalled[stream.number] = stream
                return False
            flags = Flag.END_STREAM if stream.end == b"" and size == len(backlog) else 0
            self.out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, flags, stream.number))
            self.out.append(bytes(backlog[:size]))
            del backlog[:size]
            stream.peer_credit -= size
            self.window -= size
            self._wait(-size)
            if stream.stalled_since is not None:
                stream.stalled_since = None
                del self._stalled[stream.number]
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
        """Called when the peer opens its window of a stream."""
        stream.peer_credit += more
        if stream.backlog is not None:
            self.pump(stream)

    def widen_all(self, initial_window: int) -> None:
        """Called when the peer changes its initial window. `send_some` sends what may be sent now. Raises
        FrameError.
        """
        widest = max((stream.peer_credit for stream in self.by_number.values()), default=0)
        if widest + initial_window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
        self.initial_window = initial_window
        self._waiting.update(self._stalled)

    def widen_connection(self, more: int) -> None:
        """Called when the peer opens the window of the connection. Raises FrameError."""
        if not more:
            raise FrameError(Code.PROTOCOL_ERROR, "window_overflow")
        self.window += more
        if self.window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")

    def send_some(self, most: int) -> bool:
        """Send the answers of at most so many streams that waited for their turn, those first that have
        waited longest. Returns whether more may be sent now.
        """
        while self._waiting and self.window > 0 and most > 0:
            most -= 1
            self.pump(self._waiting.popitem(last=False)[1])
        return bool(self._waiting) and self.window > 0

    def stalled(self, since: float) -> list[Stream]:
        """Return the streams whose answers have waited for a window since that time or longer."""
        return list(takewhile(lambda s: (s.stalled_since or 0.0) <= since, self._stalled.values()))

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

    def cut(self, stream: Stream) -> None:
        """Forget a stream that has not come to its end. The handler of the call learns of this, if there is
        one and it has not ended the call.
        """
        self.forget(stream)
        if stream.lingers_until is None and stream.end is None:
            self.events.append(Gone(stream.number))

    def forget(self, stream: Stream) -> None:
        stream.state = State.CLOSED
        self.by_number.pop(stream.number, None)
        if stream.lingers_until is not None:
            self.lingering.pop(stream.number, None)
        self._waiting.pop(stream.number, None)
        self._stalled.pop(stream.number, None)
        if stream.backlog is not None:
            self._wait(-len(stream.backlog))
            stream.backlog = None
        stream.drop_assembly()
        self.windows.settle(stream, gone=True)

    def check_integrity(self) -> None:
        for number, stream in self.by_number.items():
            assert number == stream.number <= self.last_id
            assert stream.state is not State.CLOSED
            assert 0 <= stream.window <= self._limits.stream_window_bytes
            assert stream.end is None or stream.backlog or stream.lingers_until is not None
            assert not stream.owed or stream.backlog
        assert self.lingering.keys() <= self.by_number.keys()
        assert self.windows.unsent == sum(len(stream.backlog or b"") for stream in self.by_number.values())
        assert len(self.lately) <= _LATELY
