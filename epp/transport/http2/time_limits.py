"""The time limits of one connection: of its beginning, its calls, its windows and its silence. They are
checked a few times a second. Pure.
"""

from __future__ import annotations

from typing import Final

from epp.transport.http2 import frames
from epp.transport.http2.call_events import Gone
from epp.transport.http2.control_frames import ControlFrames
from epp.transport.http2.faults import Faults
from epp.transport.http2.frames import Code, FrameError, Kind
from epp.transport.http2.grpc_messages import DEADLINE_EXCEEDED, BadMessageError
from epp.transport.http2.header_parts import HeaderParts
from epp.transport.http2.limits import Limits
from epp.transport.http2.streams import Stream, StreamTable

_ARE_YOU_THERE: Final = b"quiet..."


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
