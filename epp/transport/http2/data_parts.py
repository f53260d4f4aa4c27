"""DATA frames of other forms than one whole message for a handler. `DataParts` reads frames that come in
parts, have padding or end a stream, or hold several messages or the beginning of a message. The body of a
frame is passed on as it comes, so nothing but unfinished messages is kept. Pure; called by `connection`.
"""

from __future__ import annotations

from epp.transport.http2.control import Faults
from epp.transport.http2.frames import Code, Flag, FrameError, Kind, Limits
from epp.transport.http2.grpc_messages import (
    INTERNAL,
    PREFIX_BYTES,
    Assembly,
    BadMessageError,
    HeldBytes,
    Message,
    message_bytes,
)
from epp.transport.http2.streams import State, Stream, StreamTable


class DataParts:
    """The DATA frame that is being read. Every method may raise FrameError."""

    def __init__(self, limits: Limits, held: HeldBytes, streams: StreamTable, faults: Faults) -> None:
        self._max_message_bytes = limits.max_message_bytes
        self._held = held
        self._streams = streams
        self._faults = faults
        self.unfinished = False
        """Whether bytes of the current frame are still to come."""
        self._left = 0
        """Bytes still missing from the body of the frame."""
        self._padding = 0
        """Bytes to skip after the body."""
        self._into: Stream | None = None
        """The stream of the frame. None: the frame belongs to no stream and is skipped."""
        self._into_size = 0
        self._into_ends = False

    def begin(self, data: bytes, at: int, *, size: int, flags: int, number: int) -> int:
        """Take a frame, or its beginning. Its payload of `size` bytes begins at `at`. Returns where the rest
        begins, or -1 if too little has come.
        """
        padding = 0
        if flags & Flag.PADDED:
            if at == len(data) and size:
                return -1
            padding = data[at] + 1 if size else 1
            if padding > size:
                raise FrameError(Code.PROTOCOL_ERROR, "bad_padding")
            at += 1
        self._begin(number, size, padding=padding, ends=bool(flags & Flag.END_STREAM))
        self._left = size - padding
        self._padding = max(0, padding - 1)
        return self.go_on(data, at)

    def skip(self, size: int) -> None:
        """Skip the next bytes, which are the payload of an unknown frame."""
        self._padding, self._into_size = size, 0
        self.unfinished = size > 0

    def go_on(self, data: bytes, at: int) -> int:
        """Read more of the unfinished frame. Returns where the rest begins."""
        end = len(data)
        if self._left:
            begin, stop = at, min(end, at + self._left)
            if at < stop:
                at = self._part(data, at, stop)
            self._left -= at - begin
        if self._padding and not self._left:
            stop = min(end, at + self._padding)
            self._padding -= stop - at
            at = stop
        self.unfinished = self._left > 0 or self._padding > 0
        if not self.unfinished:
            self._end()
        return at

    def peer_ended(self, stream: Stream) -> None:
        """Called when the peer has sent END_STREAM and everything before it."""
        if stream.assembly is None:
            self._streams.peer_ended(stream)
        else:
            self._faults.give_up(stream, INTERNAL, "the stream ended within a message", reason="cut_message")

    def _begin(self, number: int, size: int, *, padding: int, ends: bool) -> None:
        """Count a frame of `size` bytes, `padding` of which do not belong to the body."""
        self._streams.windows.take(size)
        stream = self._streams.by_number.get(number)
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

    def _part(self, data: bytes, at: int, end: int) -> int:
        """Add bytes of the body, and report the gRPC messages that they complete. Returns where the rest
        begins, if the steps are used up.
        """
        stream, streams = self._into, self._streams
        if stream is None or stream.end is not None or stream.state is State.CLOSED:
            return end
        stream.reply = None
        most, events = self._max_message_bytes, streams.events
        try:
            while at < end and streams.steps > 0:
                streams.steps -= 1
                assembly = stream.assembly
                if assembly is None:
                    if end - at >= PREFIX_BYTES:
                        start = at + PREFIX_BYTES
                        stop = start + message_bytes(data, at, max_bytes=most)
                        if stop <= end:
                            events.append(Message(stream.number, data[start:stop]))
                            at = stop
                            continue
                    assembly = stream.assembly = Assembly(
                        self._held, stream.number, holder=streams.unfinished, now=streams.now
                    )
                at = assembly.take(data, at, end, max_bytes=most)
                message = assembly.whole()
                if message is not None:
                    stream.assembly = None
                    events.append(Message(stream.number, message))
        except BadMessageError as error:
            self._faults.give_up(stream, error.status, error.details, reason=error.reason)
            return end
        return at

    def _end(self) -> None:
        stream, self._into = self._into, None
        gone = stream is None or stream.state is State.CLOSED
        if self._into_ends and stream is not None and not gone:
            self.peer_ended(stream)
        self._streams.windows.taken_in(None if gone else stream, self._into_size)
