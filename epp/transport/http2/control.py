"""The frames that carry no part of a call (SETTINGS, PING, GOAWAY, PRIORITY, RST_STREAM and unknown kinds),
our own leaving, and the time limits of one connection: of its beginning, its calls, its windows and its
silence. They are checked a few times a second. Pure.
"""

from __future__ import annotations

from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.call_events import Gone
from epp.transport.http2.faults import Faults
from epp.transport.http2.frames import Code, Flag, FrameError, Kind, Setting
from epp.transport.http2.grpc_messages import DEADLINE_EXCEEDED, BadMessageError
from epp.transport.http2.headers import HeaderParts
from epp.transport.http2.limits import Limits
from epp.transport.http2.streams import Stream, StreamTable

_DRAINING: Final = b"draining"
_ARE_YOU_THERE: Final = b"quiet..."
_FRAME_BYTES: Final = {Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = frozenset((Kind.SETTINGS, Kind.PING, Kind.GOAWAY))


class ControlFrames:
    """Knows what the peer knows of us: whether it has acknowledged our settings, and how far it knows that we
    leave. Every method that handles a frame may raise FrameError.
    """

    def __init__(self, streams: StreamTable, faults: Faults) -> None:
        self._streams = streams
        self._faults = faults
        self.settings_seen = False
        """The preface of the peer is complete: its first SETTINGS have come."""
        self.settings_acked = False
        """The peer has acknowledged our settings."""
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
        elif frames.read_u32(payload)[0] & frames.MAX_STREAM_ID == number:
            self._faults.stream_error(number, Code.PROTOCOL_ERROR, "depends_on_itself")

    def _on_reset(self, number: int) -> None:
        stream = self._streams.by_number.get(number)
        if stream is None:
            self._faults.unexpected(number, Kind.RST_STREAM)
            return
        if not stream.answered:
            self._faults.too_many("rapid_reset")
        handler_waits = stream.handler_waits
        self._streams.forget(stream)
        if handler_waits:
            self._streams.events.append(Gone(number, "reset"))

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & Flag.ACK and payload):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        self._faults.too_many("settings_flood")
        self.settings_seen = True
        if flags & Flag.ACK:
            self.settings_acked = True
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


class TimeLimits:
    """Every method may raise FrameError."""

    def __init__(
        self, limits: Limits, streams: StreamTable, faults: Faults, control: ControlFrames, parts: HeaderParts
    ) -> None:
        self._limits = limits
        self._streams = streams
        self._faults = faults
        self._header_parts = parts
        self._control = control
        self._started = streams.now
        self._asked_at: float | None = None

    def check(self, *, read_at: float) -> None:
        """Check all limits at `streams.now`. read_at: when the peer's last bytes were read."""
        now = self._streams.now
        self._check_hello(now)
        self._check_calls(now)
        self._check_quiet(now, read_at=read_at)

    def _check_hello(self, now: float) -> None:
        limits = self._limits
        if not self._control.settings_seen:
            if now - self._started > limits.hello_s:
                raise FrameError(Code.PROTOCOL_ERROR, "no_hello")
        elif not self._control.settings_acked and now - self._started > limits.settings_s:
            raise FrameError(Code.SETTINGS_TIMEOUT, "settings_not_acknowledged")
        since = self._header_parts.since
        if since is not None and now - since > limits.header_s:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "unfinished_headers")

    def _check_calls(self, now: float) -> None:
        streams = self._streams
        torn = [streams.by_number.get(number) for number in streams.unfinished.torn]
        streams.unfinished.torn.clear()
        for stream in torn:
            self._end_torn(stream)
        for stream in [s for s in streams.timed.values() if s.deadline is not None and s.deadline <= now]:
            del streams.timed[stream.number]
            stream.deadline = None
            if stream.end is None:
                streams.events.append(Gone(stream.number, "deadline"))
                streams.end(stream, DEADLINE_EXCEEDED, "the call's time is over")
        for stream in [s for s in streams.lingering.values() if s.lingers_until and s.lingers_until <= now]:
            streams.send_reset(stream.number, Code.NO_ERROR)
            streams.forget(stream)
        for stream in streams.stalled(now - self._limits.stalled_s):
            self._faults.reset(stream, Code.CANCEL, "window_never_opened")

    def _end_torn(self, stream: Stream | None) -> None:
        """End the call, if it waits for the rest of a message whose bytes were thrown away."""
        if stream is not None and stream.assembly is not None:
            try:
                stream.assembly.require_whole()
            except BadMessageError as error:
                self._faults.give_up(stream, error.status, error.details, reason=error.reason)

    def _check_quiet(self, now: float, *, read_at: float) -> None:
        """Send a quiet peer a PING: if it has disappeared, its streams would stay open for ever. Ask a peer
        that has no streams to leave.
        """
        quiet_s = now - read_at
        if not self._streams.by_number and quiet_s > self._limits.idle_s:
            self._control.leave()
            if quiet_s > self._limits.idle_s + self._limits.answer_s:
                raise FrameError(Code.NO_ERROR, "peer_gone")
        elif not self._streams.by_number or quiet_s <= self._limits.quiet_s:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now
            self._streams.out.append(frames.frame(Kind.PING, _ARE_YOU_THERE))
        elif now - self._asked_at > self._limits.answer_s:
            raise FrameError(Code.NO_ERROR, "peer_gone")
