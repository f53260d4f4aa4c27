"""The frames and times that a usual call does not meet. `DataParts` reads DATA frames that come in parts,
have padding or end a stream, or hold several messages or the beginning of a message. `Control` handles frames
that carry no part of a call (SETTINGS, PING, GOAWAY, PRIORITY, RST_STREAM and unknown kinds), our own
leaving, and the time limits of one connection. Pure; called by `connection`.
"""

from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.frames import Code, Flag, FrameError, HeaderReader, Kind, Setting
from epp.transport.http2.messages import (
    INTERNAL,
    PREFIX_BYTES,
    Assembly,
    BadMessageError,
    Message,
    message_bytes,
)
from epp.transport.http2.streams import Stream, StreamTable

_DRAINING: Final = b"draining"
_ARE_YOU_THERE: Final = b"quiet..."
_FRAME_BYTES: Final = {Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = frozenset((Kind.SETTINGS, Kind.PING, Kind.GOAWAY))


class DataParts:
    """The DATA frame that is being read. The body of a frame is passed on as it comes, so nothing but
    unfinished messages is kept. Every method may raise FrameError.
    """

    def __init__(self, streams: StreamTable) -> None:
        self._streams = streams
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
            self._streams.give_up(stream, INTERNAL, "the stream ended within a message", reason="cut_message")

    def _begin(self, number: int, size: int, *, padding: int, ends: bool) -> None:
        """Count a frame of `size` bytes, `padding` of which do not belong to the body."""
        streams = self._streams
        streams.count(size)
        stream = streams.by_number.get(number)
        if stream is None or stream.peer_ended:
            streams.unexpected(number, Kind.DATA)
            stream = None
        elif size > stream.window:
            streams.stream_error(number, Code.FLOW_CONTROL_ERROR, "window_overrun")
            stream = None
        else:
            stream.window -= size
            if stream.declared is not None:
                stream.declared -= size - padding
                if stream.declared < 0 or (stream.declared and ends):
                    streams.stream_error(number, Code.PROTOCOL_ERROR, "content_length")
                    stream = None
        if not size and not ends:
            streams.too_many("empty_frame_flood")
        self._into, self._into_size, self._into_ends = stream, size, ends

    def _part(self, data: bytes, at: int, end: int) -> int:
        """Add bytes of the body, and report the gRPC messages that they complete. Returns where the rest
        begins, if the steps are used up.
        """
        stream, streams = self._into, self._streams
        if stream is None or stream.end is not None or not stream.open:
            return end
        stream.reply = None
        most, events = streams.limits.max_message_bytes, streams.events
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
                        streams.held, stream.number, holder=streams.unfinished, now=streams.now
                    )
                at = assembly.take(data, at, end, max_bytes=most)
                message = assembly.whole()
                if message is not None:
                    stream.assembly = None
                    events.append(Message(stream.number, message))
        except BadMessageError as error:
            streams.give_up(stream, error.status, error.details, reason=error.reason)
            return end
        return at

    def _end(self) -> None:
        stream, self._into = self._into, None
        gone = stream is None or not stream.open
        if self._into_ends and stream is not None and not gone:
            self.peer_ended(stream)
        self._streams.taken_in(None if gone else stream, self._into_size)


class Control:
    """Knows how far the peer knows that we leave. A method that handles a frame or checks the time may raise
    FrameError.
    """

    def __init__(self, streams: StreamTable, headers: HeaderReader) -> None:
        self._limits = streams.limits
        self._streams = streams
        self._headers = headers
        self._started = streams.now
        self._asked_at: float | None = None
        """When a quiet peer got a PING that it has not answered."""
        self._used_at = streams.now
        """When the last check found a stream that was open, or had been since the check before it."""
        self._used_id = streams.last_id
        self.settings_seen = False
        """The preface of the peer is complete: its first SETTINGS have come."""
        self.leaving = False
        """The peer was asked to open no more streams."""
        self.left_for_good = False
        """The peer knows that streams which it opens from now on are refused."""

    def leave(self) -> None:
        """Ask the peer to open no more streams. Idempotent."""
        if not self.leaving:
            self.leaving = True
            self._streams.out.append(frames.goaway(frames.MAX_STREAM_ID, Code.NO_ERROR))
            self._streams.out.append(frames.frame(Kind.PING, _DRAINING))

    def receive(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle a frame of any kind but DATA, HEADERS, CONTINUATION and a correct WINDOW_UPDATE."""
        if kind in _OF_THE_CONNECTION and number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != _FRAME_BYTES.get(kind, len(payload)):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        if kind == Kind.RST_STREAM:
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
            self._streams.too_many("unneeded_frame_flood")

    def _on_priority(self, number: int, payload: bytes) -> None:
        self._streams.too_many("unneeded_frame_flood")
        if not number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != 5:
            self._streams.stream_error(number, Code.FRAME_SIZE_ERROR, "bad_frame_size")

    def _on_reset(self, number: int) -> None:
        stream = self._streams.by_number.get(number)
        if stream is None:
            self._streams.unexpected(number, Kind.RST_STREAM)
            return
        if not stream.answered:
            self._streams.too_many("rapid_reset")
        self._streams.cut(stream)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & Flag.ACK and payload):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        self._streams.too_many("settings_flood")
        self.settings_seen = True
        if flags & Flag.ACK:
            return
        values = dict(frames.read_setting(payload, at) for at in range(0, len(payload), 6))
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._streams.frame_bytes)
        if not frames.DEFAULT_FRAME_BYTES <= frame_bytes <= frames.MAX_FRAME_BYTES:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        self._streams.frame_bytes = frame_bytes
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self._streams.initial_window)
        if window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "bad_setting")
        self._streams.out.append(frames.SETTINGS_ACK)
        if window != self._streams.initial_window:
            self._streams.steps -= len(self._streams.by_number) >> 4
            self._streams.widen_all(window)

    def _on_ping(self, flags: int, payload: bytes) -> None:
        self._streams.too_many("ping_flood")
        if not flags & Flag.ACK:
            self._streams.out.append(frames.pack_head(0, len(payload), Kind.PING, Flag.ACK, 0) + payload)
        elif payload == _DRAINING and self.leaving and not self.left_for_good:
            # Second step: streams that the peer opens from now on are refused.
            self.left_for_good = True
            self._streams.out.append(frames.goaway(self._streams.last_id, Code.NO_ERROR))

    def _on_goaway(self, payload: bytes) -> None:
        """Called when the peer opens no more streams. Its open streams continue."""
        self._streams.too_many("unneeded_frame_flood")
        if len(payload) < 8:
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")

    def check(self, *, read_at: float) -> None:
        """Check all limits at `streams.now`. read_at: when the peer's last bytes were read."""
        now = self._streams.now
        self._check_hello(now)
        self._check_calls(now)
        self._check_quiet(now, read_at=read_at)
        self._check_idle(now)

    def _check_hello(self, now: float) -> None:
        if not self.settings_seen and now - self._started > self._limits.hello_s:
            raise FrameError(Code.PROTOCOL_ERROR, "no_hello")
        since = self._headers.since
        if since is not None and now - since > self._limits.header_s:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "unfinished_headers")

    def _check_calls(self, now: float) -> None:
        streams = self._streams
        torn, streams.unfinished.torn = streams.unfinished.torn, []
        for stream in filter(None, map(streams.by_number.get, torn)):
            if stream.assembly is not None:  # The call waits for the rest of a message that was thrown away.
                error = stream.assembly.torn()
                streams.give_up(stream, error.status, error.details, reason=error.reason)
        for stream in [s for s in streams.lingering.values() if s.lingers_until and s.lingers_until <= now]:
            streams.send_reset(stream.number, Code.NO_ERROR)
            streams.forget(stream)
        for stream in streams.stalled(now - self._limits.stalled_s):
            self._streams.stream_error(stream.number, Code.CANCEL, "window_never_opened")

    def _check_quiet(self, now: float, *, read_at: float) -> None:
        """Send a quiet peer a PING: if it has disappeared, its streams would stay open for ever."""
        if now - read_at <= self._limits.quiet_s:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now
            self._streams.out.append(frames.frame(Kind.PING, _ARE_YOU_THERE))
        elif now - self._asked_at > self._limits.answer_s:
            raise FrameError(Code.NO_ERROR, "peer_gone")

    def _check_idle(self, now: float) -> None:
        """Leave a peer that has no calls. It opens another connection for its next call."""
        streams, limits = self._streams, self._limits
        if streams.by_number or streams.last_id != self._used_id:
            self._used_at, self._used_id = now, streams.last_id
        elif now - self._used_at > limits.idle_s + limits.answer_s:
            raise FrameError(Code.NO_ERROR, "peer_gone")
        elif now - self._used_at > limits.idle_s:
            self.leave()
