"""Flow control of what the peer sends: our windows, and when they are opened again. Pure.

A window opens again as its bytes are taken in, in steps of half a window. While too much of a stream's answer waits for the
peer's own window, what the peer sends on that stream opens nothing: so it cannot make us hold more than a window of it.
"""

from __future__ import annotations

from epp.http2 import frames
from epp.http2.frame_reader import FrameError
from epp.http2.frames import Code
from epp.http2.limits import Limits
from epp.http2.sending import Sender
from epp.http2.streams import State, Stream


class Windows:
    def __init__(self, limits: Limits, sender: Sender) -> None:
        self._sender = sender
        self._backlog_bytes = limits.backlog_bytes
        self._stream_step = limits.stream_window_bytes // 2
        self._step = limits.connection_window_bytes // 2
        self.window = limits.connection_window_bytes
        """What the peer may still send on the connection."""
        self._credit = 0

    def take(self, size: int) -> None:
        """So many bytes come. FrameError where the peer may not send them."""
        self.window -= size
        if self.window < 0:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overrun")

    def taken_in(self, stream: Stream | None, size: int) -> None:
        """So much of what the peer sent is not held by a window any more."""
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
        """Open what was held back, if the answer has gone on or the stream is over."""
        if stream.owed and (gone or stream.backlog_bytes <= self._backlog_bytes):
            owed, stream.owed = stream.owed, 0
            self.taken_in(None if gone else stream, owed)
