"""The record of an open stream, and flow control in both directions: what is sent to the peer, and how much
the peer may send. Pure; called by `connection` and `streams`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping

from epp.http2 import frames
from epp.http2.frames import HEAD_BYTES, Code, Flag, FrameError, Kind, Setting, pack_head, unpack_head
from epp.http2.headers import GRPC_RESPONSE
from epp.http2.limits import Limits
from epp.http2.messages import Assembly

_SHRINK_TABLE = b"\x20"
"""HPACK: sets our dynamic table to size 0. In front of our first block this is valid for any size that the
peer allows."""


_MOST_REPLIES = 2_000
"""The most frames that are answered by replies in one read. They take some 2 ms, after which other
connections have their turn."""


class State(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()
    ANSWERING = enum.auto()
    """Half-closed (remote): the peer has sent everything, and we still send."""
    ANSWERED = enum.auto()
    """Half-closed (local): we have sent everything, and the peer has not."""
    CLOSED = enum.auto()

    __hash__ = object.__hash__


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
        """If we refused the call: until when the peer may go on sending. These bytes are thrown away."""


class Sender:
    """Sends frames to the peer in the order of the wire, as far as the peer's windows and frame size allow.

    Owns the bytes to be written, the peer's settings and its window of the connection. An answer that does
    not fit its windows waits on its stream, in order, and delays no other stream. `connection` decides when a
    stream is over.
    """

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self._shrunk = False
        self._waiting: dict[int, Stream] = {}
        """Streams whose own window is open while the window of the connection is closed."""
        self._stalled: dict[int, Stream] = {}
        """Streams that wait for either window."""
        self.window = frames.DEFAULT_WINDOW
        """How many more bytes we may send on the connection."""
        self.initial_window = frames.DEFAULT_WINDOW
        """The window of each new stream."""
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES

    def hello(self, limits: Limits) -> None:
        """Queue our settings and our window. Must come first."""
        values = (
            (Setting.HEADER_TABLE_SIZE, 0),
            (Setting.MAX_CONCURRENT_STREAMS, limits.max_streams),
            (Setting.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
            (Setting.MAX_FRAME_SIZE, limits.max_frame_bytes),
            (Setting.MAX_HEADER_LIST_SIZE, limits.max_header_bytes),
        )
        self._out.append(frames.settings(values))
        self._out.append(frames.window_update(0, limits.connection_window_bytes - frames.DEFAULT_WINDOW))

    def take(self) -> bytes:
        """Return the bytes to write now. Each byte is returned once."""
        out = self._out
        if not out:
            return b""
        self._out = []
        return out[0] if len(out) == 1 else b"".join(out)

    def control(self, data: bytes) -> None:
        """Queue a frame to which no window applies."""
        self._out.append(data)

    def message(self, stream: Stream, data: bytes, *, now: float) -> None:
        """Queue one gRPC message, after the headers of the answer."""
        if not stream.answered:
            stream.answered = True
            self._headers(stream.number, GRPC_RESPONSE, flags=Flag.END_HEADERS)
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
            self._out.append(frames.message_head(size, stream.number))
            self._out.append(data)
            return
        if stream.backlog is None:
            stream.backlog = deque()
        stream.backlog.append(memoryview(b"\0" + size.to_bytes(4) + data))
        stream.backlog_bytes += whole
        self.pump(stream, now=now)

    def at_once(self, stream: Stream, messages: bytes) -> bool:
        """Queue whole messages, with their heads, in one frame. False: a window or the frame is too small."""
        size = len(messages)
        if (
            stream.backlog is not None
            or size > stream.peer_window
            or size > self.window
            or size > self.frame_bytes
        ):
            return False
        stream.peer_window -= size
        self.window -= size
        self._out.append(pack_head(size >> 8, size & 0xFF, Kind.DATA, 0, stream.number))
        self._out.append(messages)
        return True

    def end(self, stream: Stream, block: bytes, *, now: float) -> bool:
        """Queue the header block that ends the answer. False: it waits for earlier data."""
        stream.end = block
        return self.pump(stream, now=now)

    def refuse(self, stream: Stream, answer: tuple[bytes, bytes], *, now: float) -> bool:
        """Queue a whole HTTP answer to a stream that is not a call. False: the answer waits for the peer's
        window.
        """
        block, body = answer
        stream.answered = True
        self._headers(stream.number, block, flags=Flag.END_HEADERS)
        stream.backlog = deque((memoryview(body),))
        stream.backlog_bytes = len(body)
        stream.end = b""
        return self.pump(stream, now=now)

    def pump(self, stream: Stream, *, now: float) -> bool:
        """Send as much of the waiting data as the windows allow. True: the answer is sent completely."""
        backlog = stream.backlog
        while backlog:
            first = backlog[0]
            size = min(len(first), self.frame_bytes, stream.peer_window, self.window)
            if size <= 0:
                if stream.peer_window > 0:
                    self._waiting[stream.number] = stream
                if stream.stalled_since is None:
                    stream.stalled_since = now
                    self._stalled[stream.number] = stream
                return False
            last = stream.end == b"" and size == stream.backlog_bytes
            flags = Flag.END_STREAM if last else 0
            self._out.append(frames.head(size, Kind.DATA, flags=flags, stream_id=stream.number))
            self._out.append(bytes(first[:size]))
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
            self._headers(stream.number, stream.end, flags=Flag.END_HEADERS | Flag.END_STREAM)
        return stream.end is not None

    def next_waiting(self) -> Stream | None:
        """Return the stream that has waited longest for the connection's window, if that is open."""
        if self.window <= 0 or not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))

    def stalled(self, since: float) -> list[Stream]:
        """Return the streams whose answers have waited for a window since that time or longer."""
        return [s for s in self._stalled.values() if s.stalled_since is not None and s.stalled_since <= since]

    def forget(self, stream: Stream) -> None:
        self._waiting.pop(stream.number, None)
        self._stalled.pop(stream.number, None)
        stream.backlog = None
        stream.backlog_bytes = 0

    def _headers(self, number: int, block: bytes, *, flags: int) -> None:
        if not self._shrunk:
            self._shrunk = True
            block = _SHRINK_TABLE + block
        self._out.append(frames.frame(Kind.HEADERS, block, flags=flags, stream_id=number))


class Windows:
    """Our own windows: how much the peer may send.

    A window opens again as its bytes are consumed, in steps of half a window. While too much of a stream's
    answer waits for the peer's window, the bytes that the peer sends on that stream do not open ours. So a
    peer can make us hold no more than a window of its answer.
    """

    def __init__(self, limits: Limits, sender: Sender) -> None:
        self._sender = sender
        self._backlog_bytes = limits.backlog_bytes
        self._stream_step = limits.stream_window_bytes // 2
        self._frame_bytes = limits.max_frame_bytes
        self._step = limits.connection_window_bytes // 2
        self.window = limits.connection_window_bytes
        """How many more bytes the peer may send on the connection."""
        self._credit = 0

    def take(self, size: int) -> None:
        """Count so many received bytes. Raises FrameError if the windows do not allow them."""
        self.window -= size
        if self.window < 0:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overrun")

    def replied(self, data: bytes, streams: Mapping[int, Stream]) -> int:
        """Answer the frames at the beginning of `data` for which there are replies, but not too many. Returns
        where the rest begins.

        Each of them is a whole DATA frame. Most reads of a full duplex answer have nothing else. The windows
        change as they do for frames that go through `FrameReader`.
        """
        at, end, left = 0, len(data), _MOST_REPLIES
        while end - at > HEAD_BYTES and left:
            high, low, kind, flags, number = unpack_head(data, at)
            stream = streams.get(number)
            start, size = at + HEAD_BYTES, high << 8 | low
            if (
                kind != Kind.DATA
                or flags
                or stream is None
                or stream.reply is None
                or stream.end is not None
                or stream.state is not State.OPEN
                or stream.assembly is not None
                or start + size > end
                or size > self._frame_bytes
                or size > stream.window
                or size > self.window
            ):
                break
            messages = stream.reply(data, start, start + size)
            if messages is None or not self._sender.at_once(stream, messages):
                break
            self.window -= size
            stream.window -= size
            self.taken_in(stream, size)
            at = start + size
            left -= 1
        return at

    def taken_in(self, stream: Stream | None, size: int) -> None:
        """Open the window by so many bytes, which have been consumed."""
        if stream is not None:
            if stream.backlog_bytes > self._backlog_bytes:
                stream.owed += size
                return
            stream.credit += size
            if stream.credit >= self._stream_step and stream.state is not State.ANSWERING:
                self._sender.control(frames.window_update(stream.number, stream.credit))
                stream.window += stream.credit
                stream.credit = 0
        self._credit += size
        if self._credit >= self._step:
            self._sender.control(frames.window_update(0, self._credit))
            self.window += self._credit
            self._credit = 0

    def settle(self, stream: Stream, *, gone: bool) -> None:
        """Open the window by the bytes that were held back, if the answer has been sent far enough or the
        stream is over.
        """
        if stream.owed and (gone or stream.backlog_bytes <= self._backlog_bytes):
            owed, stream.owed = stream.owed, 0
            self.taken_in(None if gone else stream, owed)
