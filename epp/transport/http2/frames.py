"""HTTP/2's frames and prefaces (RFC 9113): their numbers, the bytes that a server sends, and the limits on
what a peer may cause. Pure; lengths are in bytes.

`connection` and `streams` call the packers directly, so a usual request runs no function of this module.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one connection, in bytes, seconds and counts."""

    max_message_bytes: int
    """A longer gRPC message is answered with RESOURCE_EXHAUSTED."""
    max_streams: int = 10_000
    """Streams open at once. A client that needs more opens another connection."""
    max_header_bytes: int = 16_384
    """Size of one header block on the wire, and of its decoded list (RFC 9113, 6.5.2)."""
    max_header_frames: int = 16
    """HEADERS and CONTINUATION frames of one block."""
    stream_window_bytes: int = 2**20
    connection_window_bytes: int = 2**24
    max_frame_bytes: int = 2**20
    """Size of a DATA frame. The kinds of other frames bound their sizes."""
    backlog_bytes: int = 2**18
    """While more than this waits for the peer's window on a stream, bytes that the peer sends there do not
    open our window."""
    all_backlogs_bytes: int = 2**24
    """While more than this waits for the peer's windows on all streams, the window of the connection does not
    open either."""
    hello_s: float = 10.0
    """Longest time from the connection's start to the end of the client's preface and first SETTINGS."""
    header_s: float = 10.0
    """Longest time from a HEADERS frame to the end of its block."""
    message_s: float = 30.0
    """Longest time from the beginning of a gRPC message to its end."""
    stalled_s: float = 300.0
    """A stream is reset if its answer waits this long for the peer's window."""
    linger_s: float = 10.0
    """How long a peer may go on sending after its call was refused."""
    quiet_s: float = 60.0
    """A peer that sends nothing for this long gets a PING."""
    answer_s: float = 20.0
    """Longest wait for the answer to that PING."""


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
"""Takes the same."""
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
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(enum.IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream_id: int = 0) -> bytes:
    return pack_head(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    return frame(Kind.SETTINGS, b"".join(struct.pack(">HL", *pair) for pair in values))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, increment.to_bytes(4), stream_id=stream_id)


def reset(stream_id: int, code: Code) -> bytes:
    return frame(Kind.RST_STREAM, code.to_bytes(4), stream_id=stream_id)


def goaway(last_id: int, code: Code, reason: str = "") -> bytes:
    return frame(Kind.GOAWAY, last_id.to_bytes(4) + code.to_bytes(4) + reason.encode())


SETTINGS_ACK: Final = frame(Kind.SETTINGS, flags=Flag.ACK)


class FrameError(Exception):
    """The connection cannot go on. `reason` labels a metric."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def hello(limits: Limits) -> bytes:
    """Return our settings and the window of the connection, which must be sent first."""
    values = (
        (Setting.HEADER_TABLE_SIZE, 0),
        (Setting.MAX_CONCURRENT_STREAMS, limits.max_streams),
        (Setting.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
        (Setting.MAX_FRAME_SIZE, limits.max_frame_bytes),
        (Setting.MAX_HEADER_LIST_SIZE, limits.max_header_bytes),
    )
    return settings(values) + window_update(0, limits.connection_window_bytes - DEFAULT_WINDOW)


def preface_length(data: bytes) -> int:
    """Return the length of the peer's preface in front of the received bytes. 0: the preface is not complete
    yet. Raises FrameError if something else has come.
    """
    if not PREFACE.startswith(data[: len(PREFACE)]):
        raise FrameError(Code.PROTOCOL_ERROR, "bad_preface")
    return 0 if len(data) < len(PREFACE) else len(PREFACE)
