"""Frames that carry no part of a call: SETTINGS, PING, GOAWAY, PRIORITY, RST_STREAM and WINDOW_UPDATE.

Owns what the peer knows of us: whether it has acknowledged our settings, and how far it knows that we leave.
Pure; owned by `connection`, which hands it each such frame.
"""

from __future__ import annotations

from typing import Final

from epp.http2 import frames
from epp.http2.call_events import Gone
from epp.http2.flow_control import Sender
from epp.http2.frame_reader import FrameError
from epp.http2.frames import Code, Flag, Kind, Setting
from epp.http2.table import StreamTable

_DRAINING: Final = b"draining"
_FRAME_BYTES: Final = {Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = frozenset((Kind.SETTINGS, Kind.PING, Kind.GOAWAY))


class ControlFrames:
    """The control frames of one connection. Every method may raise FrameError."""

    def __init__(self, table: StreamTable, sender: Sender) -> None:
        self._table = table
        self._sender = sender
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
            self._sender.control(frames.goaway(frames.MAX_STREAM_ID, Code.NO_ERROR))
            self._sender.control(frames.frame(Kind.PING, _DRAINING))

    def frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind in _OF_THE_CONNECTION and number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != _FRAME_BYTES.get(kind, len(payload)):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        if kind == Kind.WINDOW_UPDATE:
            self._on_window_update(number, frames.read_u32(payload)[0] & 0x7FFFFFFF)
        elif kind == Kind.RST_STREAM:
            self._on_reset(number)
        elif kind == Kind.PING:
            self._on_ping(flags, payload)
        elif kind == Kind.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == Kind.PRIORITY:
            self._on_priority(number, payload)
        elif kind == Kind.GOAWAY:
            self._on_goaway(payload)
        else:
            raise FrameError(Code.PROTOCOL_ERROR, "push_promise")

    def _on_priority(self, number: int, payload: bytes) -> None:
        self._table.too_many("unneeded_frame_flood")
        if not number:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_stream_number")
        if len(payload) != 5:
            self._table.stream_error(number, Code.FRAME_SIZE_ERROR, "bad_frame_size")
        elif frames.read_u32(payload)[0] & 0x7FFFFFFF == number:
            self._table.stream_error(number, Code.PROTOCOL_ERROR, "depends_on_itself")

    def _on_reset(self, number: int) -> None:
        stream = self._table.streams.get(number)
        if stream is None:
            self._table.unexpected(number, Kind.RST_STREAM)
            return
        if not stream.answered:
            self._table.too_many("rapid_reset")
        told = stream.lingers_until is None and stream.end is None
        self._table.forget(stream)
        if told:
            self._table.events.append(Gone(number, "reset"))

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & Flag.ACK and payload):
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")
        self._table.too_many("settings_flood")
        if flags & Flag.ACK:
            self.settings_acked = True
            return
        values = dict(frames.read_setting(payload, at) for at in range(0, len(payload), 6))
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._sender.frame_bytes)
        if not frames.DEFAULT_FRAME_BYTES <= frame_bytes <= frames.MAX_FRAME_BYTES:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_setting")
        self._sender.frame_bytes = frame_bytes
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self._sender.initial_window)
        if window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "bad_setting")
        self._sender.control(frames.SETTINGS_ACK)
        more, self._sender.initial_window = window - self._sender.initial_window, window
        if more:
            for stream in list(self._table.streams.values()):
                self._table.widen(stream, more, whole=True)

    def _on_ping(self, flags: int, payload: bytes) -> None:
        self._table.too_many("ping_flood")
        if not flags & Flag.ACK:
            self._sender.control(frames.frame(Kind.PING, payload, flags=Flag.ACK))
        elif payload == _DRAINING and self.leaving and not self.left_for_good:
            # Second step: streams that the peer opens from now on are refused.
            self.left_for_good = True
            self._sender.control(frames.goaway(self._table.last_id, Code.NO_ERROR))

    def _on_goaway(self, payload: bytes) -> None:
        """The peer opens no more streams. Its open streams continue."""
        self._table.too_many("unneeded_frame_flood")
        if len(payload) < 8:
            raise FrameError(Code.FRAME_SIZE_ERROR, "bad_frame_size")

    def _on_window_update(self, number: int, more: int) -> None:
        if number:
            stream = self._table.streams.get(number)
            if stream is None:
                self._table.unexpected(number, Kind.WINDOW_UPDATE)
            elif not more:
                self._table.reset(stream, Code.PROTOCOL_ERROR, "window_overflow")
            else:
                self._table.widen(stream, more, whole=False)
            return
        if not more:
            raise FrameError(Code.PROTOCOL_ERROR, "window_overflow")
        self._sender.window += more
        if self._sender.window > frames.MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "window_overflow")
        while (stream := self._sender.next_waiting()) is not None:
            self._table.pump(stream)
