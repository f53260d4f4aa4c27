"""The frames and times that a usual call does not meet. `DataParts` reads DATA frames that come in parts,
have padding or end a stream, or hold several messages or the beginning of a message. `Control` handles frames
that carry no part of a call (SETTINGS, PING, GOAWAY, PRIORITY, RST_STREAM and unknown kinds), our own
leaving, and the time limits of one connection. Pure; called by `connection`.
"""

import struct
from itertools import takewhile
from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.frames import Code, Flag, FrameError, Kind, Setting
from epp.transport.http2.messages import PREFIX_BYTES, Assembly, BadMessageError, Message, message_bytes
from epp.transport.http2.streams import Stream, StreamTable

CLOSED: Final = "closed"
"""Why a connection is over that ends without a fault of the peer."""
_ARE_YOU_THERE: Final = b"quiet..."
_OF_THE_CONNECTION: Final = frozenset((Kind.SETTINGS, Kind.PING, Kind.GOAWAY))
_OF_A_STREAM: Final = frozenset((Kind.PRIORITY, Kind.RST_STREAM))
_FRAME_BYTES: Final = {Kind.PRIORITY: 5, Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_BUCKETS: Final = {Kind.SETTINGS: "settings_flood", Kind.PING: "ping_flood"}
"""The bucket of each kind. RST_STREAM takes a token only if its call was not answered. All kinds that mean
nothing to us have one bucket."""


class DataParts:
    """The DATA frame that is being read. The body of a frame is passed on as it comes, so nothing but
    unfinished messages is kept. Every method may raise FrameError.
    """

    def __init__(self, streams: StreamTable) -> None:
        self._streams = streams
        self.left = 0
        """How many bytes of the current frame are still to come."""
        self._padding = 0
        """How many bytes at the end of the frame do not belong to the body."""
        self._into: Stream | None = None
        """The stream of the frame. None: the frame belongs to no stream and is skipped."""
        self._into_size = 0
        """How many bytes of our windows the frame takes."""
        self._into_ends = False

    def begin(self, data: bytes, at: int, *, size: int, flags: int, number: int) -> int:
        """Take a frame, or its beginning. Its payload of `size` bytes begins at `at`. Returns where the rest
        begins, or -1 if too little has come.
        """
        start, padding = at, 0
        if flags & Flag.PADDED:
            if at == len(data) and size:
                return -1
            start, padding = at + 1, data[at] if size else 0
            if padding >= size:
                raise FrameError(Code.PROTOCOL_ERROR, "bad_padding")
        self.left, self._padding = size - (start - at), padding
        self._into_size, self._into_ends = size, bool(flags & Flag.END_STREAM)
        self._into = self._stream(number, size, body=self.left - padding)
        return self.go_on(data, start)

    def skip(self, data: bytes, at: int, *, size: int) -> int:
        """Skip the payload of an unknown frame, as far as it has come. Returns where the rest begins."""
        self.left, self._padding = size, 0
        self._into, self._into_size, self._into_ends = None, 0, False
        return self.go_on(data, at)

    def go_on(self, data: bytes, at: int) -> int:
        """Read more of the unfinished frame. Returns where the rest begins."""
        after, end = at + self.left, len(data)
        body_end = after - self._padding
        if after > end:
            after, body_end = end, min(end, body_end)
        if at < body_end:
            read = self._part(data, at, body_end)
            after = read if read < body_end else after
        self.left -= after - at
        if not self.left:
            stream = self._into and self._streams.by_number.get(self._into.number)
            if stream is not None and self._into_ends:
                self._streams.peer_ended(stream)
            self._streams.taken_in(stream, self._into_size)
        return after

    def _stream(self, number: int, size: int, *, body: int) -> Stream | None:
        """Count a frame of `size` bytes, `body` of which belong to the body. Returns its stream."""
        streams = self._streams
        streams.our_window -= size
        if streams.our_window < 0:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overrun")
        if not size and not self._into_ends:
            streams.too_many("empty_frame_flood")
        stream = streams.by_number.get(number)
        if stream is None or stream.peer_ended:
            streams.unexpected(number, Kind.DATA)
            return None
        if size > stream.window:
            streams.stream_error(number, Code.FLOW_CONTROL_ERROR, "window_overrun")
            return None
        stream.window -= size
        if stream.declared is not None:
            stream.declared -= body
            if stream.declared < 0 or (stream.declared and self._into_ends):
                streams.stream_error(number, Code.PROTOCOL_ERROR, "content_length")
                return None
        return stream

    def _part(self, data: bytes, at: int, end: int) -> int:
        """Add bytes of the body, and report the gRPC messages that they complete. Returns where the rest
        begins, if the steps are used up.
        """
        stream, streams = self._into, self._streams
        if stream is None or stream.end is not None or stream.number not in streams.by_number:
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
                        streams.held, stream.number, own=streams.own, now=streams.now
                    )
                at = assembly.take(data, at, end, max_bytes=most)
                message = assembly.whole()
                if message is not None:
                    stream.assembly = None
                    events.append(Message(stream.number, message))
        except BadMessageError as error:
            streams.give_up(stream, error)
            return end
        return at


class Control:
    """Knows whether we leave, and whether the peer is still there. A method that handles a frame or checks
    the time may raise FrameError.
    """

    def __init__(self, streams: StreamTable) -> None:
        self._limits = streams.limits
        self._streams = streams
        self._asked_at: float | None = None
        """When a quiet peer got a PING that it has not answered."""
        self._used_at = streams.now
        """When the last check found a stream that was open, or had been since the check before it. Or else
        when we began to leave."""
        self._used_id = streams.last_id
        self._leaving = False
        """The peer was asked to open no more streams."""

    def leave(self) -> None:
        """Ask the peer to open no more streams. Streams that it opens before it hears this are served."""
        self._leaving, self._used_at = True, self._streams.now
        self._streams.out.append(frames.goaway(frames.MAX_STREAM_ID, Code.NO_ERROR))

    def receive(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle a frame of any kind but DATA, HEADERS, CONTINUATION and a correct WINDOW_UPDATE."""
        if kind in (_OF_THE_CONNECTION if number else _OF_A_STREAM):
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != _FRAME_BYTES.get(kind, len(payload)):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        if kind == Kind.PUSH_PROMISE:
            raise FrameError(Code.PROTOCOL_ERROR, "push_promise")
        if kind == Kind.RST_STREAM:
            self._on_reset(number)
            return
        self._streams.too_many(_BUCKETS.get(kind, "unneeded_frame_flood"))
        if kind == Kind.PING and not flags & Flag.ACK:
            self._streams.out.append(frames.frame(Kind.PING, payload, flags=Flag.ACK))
        elif kind == Kind.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == Kind.GOAWAY and len(payload) < 8:
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")

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
        if flags & Flag.ACK:
            return
        streams, values = self._streams, dict(struct.iter_unpack(">HL", payload))
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        frame_bytes = values.get(Setting.MAX_FRAME_SIZE, streams.frame_bytes)
        if not frames.DEFAULT_FRAME_BYTES <= frame_bytes <= frames.MAX_FRAME_BYTES:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        streams.frame_bytes = frame_bytes
        window = values.get(Setting.INITIAL_WINDOW_SIZE, streams.initial_window)
        if window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "bad_setting")
        streams.out.append(frames.SETTINGS_ACK)
        if window != streams.initial_window:
            streams.steps -= len(streams.by_number) >> 4
            streams.widen_all(window)

    def check(self, *, read_at: float) -> None:
        """Check all limits at `streams.now`. read_at: when the peer's last bytes were read."""
        now = self._streams.now
        self._check_calls(now)
        self._check_quiet(now, read_at=read_at)
        self._check_idle(now)

    def _check_calls(self, now: float) -> None:
        streams, limits = self._streams, self._limits
        torn, streams.own.torn = streams.own.torn, []
        for stream in filter(None, map(streams.by_number.get, torn)):
            if stream.assembly is not None and stream.assembly.lost is not None:
                streams.give_up(stream, stream.assembly.lost)
        for stream in _since(now - limits.linger_s, streams.lingering):
            streams.send_reset(stream.number, Code.NO_ERROR)
            streams.forget(stream)
        for stream in _since(now - limits.stalled_s, streams.stalled):
            streams.stream_error(stream.number, Code.CANCEL, "window_never_opened")

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
        """Leave a peer that has no calls. It opens another connection for its next call, and has some time to
        hear of our leaving.
        """
        streams, limits = self._streams, self._limits
        if streams.by_number or streams.last_id != self._used_id:
            self._used_at, self._used_id = now, streams.last_id
        elif now - self._used_at > (limits.answer_s if self._leaving else limits.idle_s):
            if self._leaving:
                raise FrameError(Code.NO_ERROR, CLOSED)
            self.leave()


def _since(time: float, waiting: dict[Stream, float]) -> list[Stream]:
    """Return the streams that have waited since that time or longer. They come first."""
    return list(takewhile(lambda stream: waiting[stream] <= time, waiting))
