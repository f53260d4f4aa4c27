"""Ends a stream or connection whose peer breaks a rule, or asks for something that we refuse. Token buckets
stop floods.

Some frames cost us little, but cost the peer even less (PING, SETTINGS, an empty DATA). Each such frame takes
a token from the bucket of its kind. Tokens come back with time. A peer that empties a bucket is disconnected
with ENHANCE_YOUR_CALM. The buckets are far larger than what Envoy, grpcio or a busy client needs.

A call without faults uses nothing of this module. Pure.
"""

from __future__ import annotations

from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.call_events import Fault, Gone
from epp.transport.http2.frames import Code, Flag, FrameError, Kind
from epp.transport.http2.headers import refusal
from epp.transport.http2.limits import Limits
from epp.transport.http2.streams import State, Stream, StreamTable

_FRAME_NAMES: Final = {
    Kind.DATA: "data",
    Kind.HEADERS: "headers",
    Kind.RST_STREAM: "rst_stream",
    Kind.WINDOW_UPDATE: "window_update",
}
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
        if stream is not None:
            state = stream.state
        else:  # Streams with even numbers are ours to open, and we open none.
            state = State.CLOSED if number % 2 and number <= streams.last_id else State.IDLE
        closed = state is not State.IDLE
        if number in streams.lately or (closed and kind not in (Kind.HEADERS, Kind.DATA)):
            return
        reason = f"{_FRAME_NAMES[kind]}_when_{state.name.lower()}"
        if not closed:
            raise FrameError(Code.PROTOCOL_ERROR, reason)
        if state is State.CLOSED and kind == Kind.HEADERS:
            raise FrameError(Code.STREAM_CLOSED, reason)
        self.stream_error(number, Code.STREAM_CLOSED, reason)

    def give_up(self, stream: Stream, status: int, details: str, *, reason: str) -> None:
        """End a call for a reason that its service does not know."""
        self.too_many("stream_error_flood")
        self._streams.events.append(Fault(reason))
        self._streams.events.append(Gone(stream.number, reason))
        stream.drop_assembly()
        self._streams.end(stream, status, details)

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
        handler_waits = stream.handler_waits
        self._streams.forget(stream)
        try:
            self.stream_error(stream.number, code, reason)
        finally:  # The owner gets its event even if this was one fault too many.
            if handler_waits:
                self._streams.events.append(Gone(stream.number, reason))

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
            handler_waits = stream.handler_waits
            streams.forget(stream)
            if handler_waits:
                streams.events.append(Gone(stream.number, "connection"))
