"""HTTP/2's frames (RFC 9113): their numbers, the bytes of the frames that a server sends, and the frames in
the bytes that it receives. Pure; lengths are in bytes.

A `FrameReader` owns the received bytes that are not a complete frame yet. These are never more than one frame
of 16 KiB and one header block, since the payload of DATA is passed on as it comes, and frames of unknown
kinds are dropped. The `Sink` knows what a frame means.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Final, Protocol

from epp.http2.limits import Limits

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
"""Size of a frame's header: length, kind, flags, stream."""
MAX_WINDOW: Final = 2**31 - 1
MAX_STREAM_ID: Final = 2**31 - 1
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
MAX_FRAME_BYTES: Final = 2**24 - 1

unpack_head: Final = struct.Struct(">HBBBL").unpack_from
"""Returns upper and lower part of the length, kind, flags, stream."""
pack_head: Final = struct.Struct(">HBBBL").pack
_pack_message: Final = struct.Struct(">HBBBLBL").pack
read_u32: Final = struct.Struct(">L").unpack_from
read_setting: Final = struct.Struct(">HL").unpack_from


class Kind:
    """Kinds of frames. Plain numbers, since each frame compares them, and members of an enum cost several
    times as much.
    """

    DATA: Final = 0
    HEADERS: Final = 1
    PRIORITY: Final = 2
    RST_STREAM: Final = 3
    SETTINGS: Final = 4
    PUSH_PROMISE: Final = 5
    PING: Final = 6
    GOAWAY: Final = 7
    WINDOW_UPDATE: Final = 8
    CONTINUATION: Final = 9


class Flag:
    """Flags of frames. Plain numbers for the same reason."""

    END_STREAM: Final = 0x1
    ACK: Final = 0x1
    END_HEADERS: Final = 0x4
    PADDED: Final = 0x8
    PRIORITY: Final = 0x20


class Code(enum.IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(enum.IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream_id: int = 0) -> bytes:
    return head(len(payload), kind, flags=flags, stream_id=stream_id) + payload


def head(size: int, kind: int, *, flags: int, stream_id: int) -> bytes:
    return pack_head(size >> 8, size & 0xFF, kind, flags, stream_id)


def message_head(size: int, stream_id: int) -> bytes:
    """Return the header of a DATA frame, and the prefix of the one gRPC message of `size` bytes in it."""
    whole = size + 5
    return _pack_message(whole >> 8, whole & 0xFF, 0, 0, stream_id, 0, size)


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    return frame(Kind.SETTINGS, b"".join(struct.pack(">HL", *pair) for pair in values))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, increment.to_bytes(4), stream_id=stream_id)


def reset(stream_id: int, code: Code) -> bytes:
    return frame(Kind.RST_STREAM, code.to_bytes(4), stream_id=stream_id)


def goaway(last_id: int, code: Code, reason: str = "") -> bytes:
    return frame(Kind.GOAWAY, last_id.to_bytes(4) + code.to_bytes(4) + reason.encode())


SETTINGS_ACK: Final = frame(Kind.SETTINGS, flags=Flag.ACK)

_DATA, _PADDED, _END_STREAM = Kind.DATA, Flag.PADDED, Flag.END_STREAM


class FrameError(Exception):
    """The connection cannot go on. `reason` labels a metric."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Sink(Protocol):
    """Receives the frames. Every method may raise FrameError."""

    def data(self, number: int, data: bytes, at: int, end: int, *, ends: bool) -> None:
        """Take a whole DATA frame without padding; its body is `data[at:end]`. Has the same effect as the
        next three methods together.
        """

    def data_begins(self, number: int, size: int, *, padding: int, ends: bool) -> None:
        """Take the header of a DATA frame of `size` bytes, `padding` of which do not belong to the body."""

    def data_part(self, data: bytes, at: int, end: int) -> None:
        """Take bytes of the body of this frame: `data[at:end]`."""

    def data_ends(self) -> None:
        """Note that the frame is complete."""

    def header_block(self, number: int, block: bytes, *, ends: bool, depends_on_itself: bool) -> None: ...
    def frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Take a frame of any other kind. The payload of an unknown kind is left out."""


class FrameReader:
    def __init__(self, sink: Sink, limits: Limits) -> None:
        self._sink = sink
        self._limits = limits
        self._data = b""
        self._at = 0
        self._preface_seen = False
        self.hello_seen = False
        """Whether the preface and the first SETTINGS have come."""
        self._left = 0
        """Bytes still missing from the body of the current DATA frame."""
        self._padding = 0
        """Bytes of padding to skip after the body."""
        self._in_data = False
        self._block: bytearray | None = None
        self.block_since: float | None = None
        """When the unfinished header block began. None: there is none."""
        self._now = 0.0
        self._block_number = 0
        self._block_frames = 0
        self._block_ends = False
        self._block_depends = False
        self.pending = False
        """Whether complete frames may be left: `read` stopped at its limit."""
        self.between_frames = False
        """Whether everything that came is read, and the next byte begins a frame that may be of any kind."""

    def drop(self) -> None:
        self._data, self._at, self.pending = b"", 0, False

    def read(self, data: bytes, *, limit: int, now: float) -> None:
        """Pass at most `limit` frames of the received bytes to the sink. Raises FrameError."""
        self._now = now
        if data:
            self._data = self._data[self._at :] + data if self._at < len(self._data) else data
            self._at = 0
        if not self._preface_seen and not self._preface():
            return
        data, at = self._data, self._at
        end, most, sink = len(data), self._limits.max_frame_bytes, self._sink
        while limit > 0:
            if self._in_data or self._padding:
                at = self._go_on(data, at, end)
                if self._in_data or self._padding:
                    break
            if end - at < HEAD_BYTES:
                break
            high, low, kind, flags, number = unpack_head(data, at)
            size: int = high << 8 | low
            after = at + HEAD_BYTES + size
            if (
                kind == _DATA
                and after <= end
                and size <= most
                and not flags & _PADDED
                and self._block is None
                and self.hello_seen
            ):  # Nearly always: a complete DATA frame.
                sink.data(number & MAX_STREAM_ID, data, at + HEAD_BYTES, after, ends=flags & _END_STREAM != 0)
                at = after
                limit -= 1
                continue
            after = self._next(data, at, end)
            if after < 0:
                break
            at = after
            limit -= 1
        self.pending = limit <= 0 and at < end
        if self.pending:
            self._data, self._at = data, at
        else:
            self._data, self._at = data[at:], 0
        self.between_frames = at == end and not self._in_data and not self._padding and self._block is None

    def _preface(self) -> bool:
        if not PREFACE.startswith(self._data[: len(PREFACE)]):
            raise FrameError(Code.PROTOCOL_ERROR, "bad_preface")
        if len(self._data) < len(PREFACE):
            return False
        self._preface_seen = True
        self._at = len(PREFACE)
        return True

    def _next(self, data: bytes, at: int, end: int) -> int:
        """Read one frame, or the header of a DATA frame. Returns where the next frame begins, or -1 if
        this frame is not complete yet.
        """
        high, low, kind, flags, number = unpack_head(data, at)
        size: int = high << 8 | low
        number &= MAX_STREAM_ID
        if kind != Kind.DATA or self._block is not None or not self.hello_seen:
            self._check_order(kind, number)
        if size > self._limits.max_frame_bytes:
            raise FrameError(Code.FRAME_SIZE_ERROR, "frame_too_large")
        at += HEAD_BYTES
        if kind == Kind.DATA:
            return self._data_head(data, at, end, size=size, flags=flags, number=number)
        if kind > Kind.CONTINUATION:
            self._sink.frame(kind, flags, number, b"")
            self._padding = size
            return at
        if size > self._limits.max_header_bytes:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large")
        if end - at < size:
            return -1
        payload = data[at : at + size]
        if kind == Kind.HEADERS:
            self._headers(flags, number, payload)
        elif kind == Kind.CONTINUATION:
            self._continuation(flags, number, payload)
        else:
            self._sink.frame(kind, flags, number, payload)
            self.hello_seen = True
        return at + size

    def _check_order(self, kind: int, number: int) -> None:
        if not self.hello_seen and kind != Kind.SETTINGS:
            raise FrameError(Code.PROTOCOL_ERROR, "no_settings")
        if self._block is not None and (kind != Kind.CONTINUATION or number != self._block_number):
            raise FrameError(Code.PROTOCOL_ERROR, "broken_header_block")

    def _data_head(self, data: bytes, at: int, end: int, *, size: int, flags: int, number: int) -> int:
        padding = 0
        if flags & Flag.PADDED:
            if at == end and size:
                return -1
            padding = data[at] + 1 if size else 1
            if padding > size:
                raise FrameError(Code.PROTOCOL_ERROR, "bad_padding")
            at += 1
        self._sink.data_begins(number, size, padding=padding, ends=bool(flags & Flag.END_STREAM))
        self._left = size - padding
        self._padding = max(0, padding - 1)
        self._in_data = True
        return self._go_on(data, at, end)

    def _go_on(self, data: bytes, at: int, end: int) -> int:
        """Read more of the unfinished frame. Returns where the rest begins."""
        if self._left:
            stop = min(end, at + self._left)
            self._left -= stop - at
            if at < stop:
                self._sink.data_part(data, at, stop)
            at = stop
        if self._padding and not self._left:
            stop = min(end, at + self._padding)
            self._padding -= stop - at
            at = stop
        if self._in_data and not self._left and not self._padding:
            self._in_data = False
            self._sink.data_ends()
        return at

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        start, end = 0, len(payload)
        if flags & Flag.PADDED:
            start = 1
            end -= payload[0] if payload else 1
        if flags & Flag.PRIORITY:
            start += 5
        if end < start:
            raise FrameError(Code.PROTOCOL_ERROR, "bad_padding")
        depends = bool(flags & Flag.PRIORITY) and read_u32(payload, start - 5)[0] & MAX_STREAM_ID == number
        ends = bool(flags & Flag.END_STREAM)
        if flags & Flag.END_HEADERS:
            self._sink.header_block(number, payload[start:end], ends=ends, depends_on_itself=depends)
            return
        self._block, self.block_since = bytearray(payload[start:end]), self._now
        self._block_number, self._block_frames = number, 1
        self._block_ends, self._block_depends = ends, depends

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise FrameError(Code.PROTOCOL_ERROR, "broken_header_block")
        block += payload
        self._block_frames += 1
        if self._block_frames > self._limits.max_header_frames:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "continuation_flood")
        if len(block) > self._limits.max_header_bytes:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large")
        if flags & Flag.END_HEADERS:
            self._block = self.block_since = None
            self._sink.header_block(
                number, bytes(block), ends=self._block_ends, depends_on_itself=self._block_depends
            )
