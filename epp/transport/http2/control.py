"""The frames that carry no part of a call (SETTINGS, PING, GOAWAY, PRIORITY, RST_STREAM and unknown kinds),
our own leaving, the time limits of one connection, and the ends that a peer causes by breaking a rule. Pure.

Some frames cost us little, but cost the peer even less (PING, SETTINGS, an empty DATA). Each such frame takes
a token from the bucket of its kind. Tokens come back with time. A peer that empties a bucket is disconnected
with ENHANCE_YOUR_CALM. The buckets are far larger than what Envoy, grpcio or a busy client needs. A call
without faults uses nothing of this module.
"""

from __future__ import annotations

from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.frames import Code, Flag, FrameError, Kind, Limits, Setting
from epp.transport.http2.grpc_messages import Assembly, BadMessageError, Fault, Gone
from epp.transport.http2.headers import HeaderParts, refusal
from epp.transport.http2.streams import Stream, StreamTable

_RATES: Final = {
    "rapid_reset": (10_000.0, 10_000.0),
    "ping_flood": (2_000.0, 500.0),
    "settings_flood": (50.0, 5.0),
    "empty_frame_flood": (2_000.0, 200.0),
    "unneeded_frame_flood": (2_000.0, 200.0),
    "stream_error_flood": (1_000.0, 100.0),
    "header_flood": (20_000.0, 5_000.0),
}
"""The tokens of each bucket at first and at most, and those that come back in a second. `rapid_reset`:
clients that all leave at once may cause so many, and one core serves fewer. `header_flood`: blocks to decode
and parts of blocks take one each, and one for 256 bytes.
"""


class Faults:
    """Counts the faults of one connection. Every method may raise FrameError, which ends the connection."""

    def __init__(self, streams: StreamTable, limits: Limits) -> None:
        self._streams = streams
        self._limits = limits
        self._buckets: dict[str, tuple[float, float]] = {}
        """The tokens of a bucket, and when they were counted."""

    def too_many(self, what: str, *, tokens: float = 1.0) -> None:
        """Take tokens from the bucket `what`."""
        now, (most, per_s) = self._streams.now, _RATES[what]
        held, counted_at = self._buckets.get(what, (most, now))
        left = min(most, held + (now - counted_at) * per_s) - tokens
        self._buckets[what] = left, now
        if left < 0.0:
            raise FrameError(Code.ENHANCE_YOUR_CALM, what)

    def unexpected(self, number: int, kind: int) -> None:
        """Handle a frame on a stream that is not open for it (RFC 9113, section 5.1). Late frames that change
        nothing are ignored.
        """
        streams = self._streams
        stream = streams.by_number.get(number)
        # Streams with even numbers are ours to open, and we open none.
        opened = stream is not None or (number % 2 and number <= streams.last_id)
        if number in streams.lately or (opened and kind not in (Kind.HEADERS, Kind.DATA)):
            return
        if not opened:
            raise FrameError(Code.PROTOCOL_ERROR, "frame_on_idle_stream")
        if stream is None and kind == Kind.HEADERS:
            raise FrameError(Code.STREAM_CLOSED, "frame_on_closed_stream")
        self.stream_error(number, Code.STREAM_CLOSED, "frame_on_closed_stream")

    def give_up(self, stream: Stream, status: int, details: str, *, reason: str) -> None:
        """End a call for a reason that its service does not know."""
        self.too_many("stream_error_flood")
        self._streams.events.append(Fault(reason))
        self._streams.events.append(Gone(stream.number))
        stream.drop_assembly()
        self._streams.end(stream, status, details)

    def give_up_torn(self, stream: Stream, assembly: Assembly) -> None:
        try:
            assembly.require_whole()
        except BadMessageError as error:
            self.give_up(stream, error.status, error.details, reason=error.reason)

    def stream_error(self, number: int, code: Code, reason: str) -> None:
        streams = self._streams
        stream = streams.by_number.get(number)
        if stream is not None:
            self.reset(stream, code, reason)
            return
        self.too_many("stream_error_flood")
        streams.events.append(Fault(reason))
        streams.send_reset(number, code)

    def reset(self, stream: Stream, code: Code, reason: str) -> None:
        self._streams.cut(stream)
        self.stream_error(stream.number, code, reason)

    def refuse(self, stream: Stream, http_status: int) -> None:
        """Answer a stream that is not a gRPC call with an HTTP response. The stream's body is thrown away."""
        streams = self._streams
        streams.events.append(Fault("no_grpc_call"))
        stream.lingers_until = streams.now + self._limits.linger_s
        streams.lingering[stream.number] = stream
        block, body = refusal(http_status)
        stream.answered = True
        streams.send_headers(stream.number, block, flags=Flag.END_HEADERS)
        stream.end = b""
        streams.queue(stream, body)

    def fail(self, code: Code, reason: str) -> None:
        """Send GOAWAY and drop every open stream."""
        streams = self._streams
        streams.out.append(frames.goaway(streams.last_id, code, reason))
        for stream in list(streams.by_number.values()):
            streams.cut(stream)


_DRAINING: Final = b"draining"
_ARE_YOU_THERE: Final = b"quiet..."
_FRAME_BYTES: Final = {Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = frozenset((Kind.SETTINGS, Kind.PING, Kind.GOAWAY))


class Control:
    """Knows how far the peer knows that we leave. A method that handles a frame or checks the time may raise
    FrameError.
    """

    def __init__(self, limits: Limits, streams: StreamTable, faults: Faults, parts: HeaderParts) -> None:
        self._limits = limits
        self._streams = streams
        self._faults = faults
        self._header_parts = parts
        self._started = streams.now
        self._asked_at: float | None = None
        """When a quiet peer got a PING that it has not answered."""
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
            self._faults.too_many("unneeded_frame_flood")

    def _on_priority(self, number: int, payload: bytes) -> None:
        self._faults.too_many("unneeded_frame_flood")
        if not number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != 5:
            self._faults.stream_error(number, Code.FRAME_SIZE_ERROR, "bad_frame_size")

    def _on_reset(self, number: int) -> None:
        stream = self._streams.by_number.get(number)
        if stream is None:
            self._faults.unexpected(number, Kind.RST_STREAM)
            return
        if not stream.answered:
            self._faults.too_many("rapid_reset")
        self._streams.cut(stream)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & Flag.ACK and payload):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        self._faults.too_many("settings_flood")
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
        self._faults.too_many("ping_flood")
        if not flags & Flag.ACK:
            self._streams.out.append(frames.pack_head(0, len(payload), Kind.PING, Flag.ACK, 0) + payload)
        elif payload == _DRAINING and self.leaving and not self.left_for_good:
            # Second step: streams that the peer opens from now on are refused.
            self.left_for_good = True
            self._streams.out.append(frames.goaway(self._streams.last_id, Code.NO_ERROR))

    def _on_goaway(self, payload: bytes) -> None:
        """Called when the peer opens no more streams. Its open streams continue."""
        self._faults.too_many("unneeded_frame_flood")
        if len(payload) < 8:
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")

    def check(self, *, read_at: float) -> None:
        """Check all limits at `streams.now`. read_at: when the peer's last bytes were read."""
        now = self._streams.now
        self._check_hello(now)
        self._check_calls(now)
        self._check_quiet(now, read_at=read_at)

    def _check_hello(self, now: float) -> None:
        if not self.settings_seen and now - self._started > self._limits.hello_s:
            raise FrameError(Code.PROTOCOL_ERROR, "no_hello")
        since = self._header_parts.since
        if since is not None and now - since > self._limits.header_s:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "unfinished_headers")

    def _check_calls(self, now: float) -> None:
        streams = self._streams
        torn, streams.unfinished.torn = streams.unfinished.torn, []
        for stream in filter(None, map(streams.by_number.get, torn)):
            if stream.assembly is not None:  # The call waits for the rest of a message that was thrown away.
                self._faults.give_up_torn(stream, stream.assembly)
        for stream in [s for s in streams.lingering.values() if s.lingers_until and s.lingers_until <= now]:
            streams.send_reset(stream.number, Code.NO_ERROR)
            streams.forget(stream)
        for stream in streams.stalled(now - self._limits.stalled_s):
            self._faults.reset(stream, Code.CANCEL, "window_never_opened")

    def _check_quiet(self, now: float, *, read_at: float) -> None:
        """Send a quiet peer a PING: if it has disappeared, its streams would stay open for ever."""
        if now - read_at <= self._limits.quiet_s:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now
            self._streams.out.append(frames.frame(Kind.PING, _ARE_YOU_THERE))
        elif now - self._asked_at > self._limits.answer_s:
            raise FrameError(Code.NO_ERROR, "peer_gone")
