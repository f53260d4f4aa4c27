"""HTTP/2's frames and prefaces (RFC 9113): their numbers, the bytes that a server sends, and the limits on
what a peer may cause. Header blocks: HPACK by the `hpack` library, and the headers of a request that a gRPC
server needs. Pure; lengths are in bytes.

A data plane opens thousands of streams with the same headers, and decoding them each time would be most of
the cost of a stream. When the peer has reduced its dynamic table to size 0, as our SETTINGS ask, a block
always means the same. So the decoded headers of a bounded number of short blocks are cached. Older clients
never reduce the table and keep its usual size, which is allowed.

`connection` and `streams` call the packers directly, so a usual request runs no function of this module.
"""

import enum
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from hpack import Decoder, HPACKError, OversizedHeaderListError
from msgspec import Struct


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
    all_backlogs_bytes: int = 2**23
    """While more than this waits for the peer's windows on all streams, the window of the connection does not
    open either."""
    beginning_s: float = 10.0
    """Longest time from the connection's start to the end of the client's preface and first SETTINGS, and
    from a HEADERS frame to the end of its block."""
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
    idle_s: float = 300.0
    """A peer that has no open streams for this long is asked to open no more."""


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


RATES: Final = {
    "rapid_reset": (10_000.0, 10_000.0),
    "ping_flood": (2_000.0, 500.0),
    "settings_flood": (50.0, 5.0),
    "empty_frame_flood": (2_000.0, 200.0),
    "unneeded_frame_flood": (2_000.0, 200.0),
    "stream_error_flood": (1_000.0, 100.0),
    "header_flood": (20_000.0, 5_000.0),
}
"""The buckets: the tokens of each at first and at most, and those that come back in a second.

Some frames cost us little, but cost the peer even less (PING, SETTINGS, an empty DATA). Each such frame takes
a token from the bucket of its kind. A peer that empties a bucket is disconnected with ENHANCE_YOUR_CALM. The
buckets are far larger than what Envoy, grpcio or a busy client needs. `rapid_reset`: clients that all leave
at once may cause so many, and one core serves fewer. `header_flood`: blocks to decode and parts of blocks
take one each, and one for 256 bytes.
"""


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


# -- header blocks -------------------------------------------------------------------------------------------

_KEPT_BLOCKS: Final = 256
_KEPT_BYTES: Final = 1024

_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_NEEDED: Final = (b":method", b":scheme", b":path")
_OF_A_CONNECTION: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_NAME: Final = re.compile(rb"[\x21-\x39\x3b-\x40\x5b-\x7e]+").fullmatch
_BAD_VALUE: Final = re.compile(rb"[\0\r\n]").search
_TOO_MANY_RESIZES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]{0,9}[\0-\x7f]){3}").match
"""Three changes of the table's size at the beginning of a block. RFC 7541, section 4.2, allows two."""


class MalformedRequestError(Exception):
    """The headers are not an HTTP request (RFC 9113, section 8), so the stream is reset."""


class Request(Struct, frozen=True, gc=False):
    """The parts of a request's headers that a gRPC server needs."""

    path: str
    refuse_status: int = 0
    """HTTP status of the refusal if the request is not a gRPC call. 0: it is a gRPC call."""
    declared_bytes: int | None = None
    """Content-Length."""
    traceparent: str = ""
    """The caller's trace context, unchanged."""


class HeaderReader:
    """Joins and decodes the header blocks of one connection. It must get every block once, in the order of
    the wire. A block that cannot be decoded is a FrameError: no later block could be decoded either. The size
    of a block and the number of its frames are bounded.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decoder = Decoder(max_header_list_size=limits.max_header_bytes)
        self.known: dict[bytes, Request] = {}
        """Requests by their blocks, which need not be decoded again. Empty unless the peer's table has size
        0, so that a block always means the same."""
        self.number = 0
        """The stream of the latest block that came in parts."""
        self.ends = False
        """Whether this block ends the peer's side of the stream."""
        self._block = b""
        self._frames = 0

    def join(self, kind: int, flags: int, number: int, payload: bytes) -> bytes | None:
        """Add a HEADERS or CONTINUATION frame. Returns the block if it is complete. Raises FrameError."""
        if kind == Kind.HEADERS:
            self._block, self._frames = _unpadded(flags, payload), 1
            self.number, self.ends = number, bool(flags & Flag.END_STREAM)
        else:
            self._block += payload
            self._frames += 1
        if self._frames > self._limits.max_header_frames:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "continuation_flood")
        if len(self._block) > self._limits.max_header_bytes:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large")
        if not flags & Flag.END_HEADERS:
            return None
        block, self._block = self._block, b""
        return block

    def request(self, block: bytes) -> Request:
        """Read the header block of a request that is not `known`. Raises MalformedRequestError."""
        pure = self._pure
        request = read_request(self.decode(block))
        if pure and self._pure and len(block) <= _KEPT_BYTES:
            if len(self.known) >= _KEPT_BLOCKS:
                self.known.clear()
            self.known[block] = request
        return request

    @property
    def _pure(self) -> bool:
        return bool(self._decoder.header_table_size == 0)

    def decode(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return the fields of a block."""
        if _TOO_MANY_RESIZES(block):  # `hpack` would obey each of them
            raise FrameError(Code.COMPRESSION_ERROR, "unreadable_headers")
        try:
            return cast("Sequence[tuple[bytes, bytes]]", self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large") from error
        except HPACKError as error:
            raise FrameError(Code.COMPRESSION_ERROR, "unreadable_headers") from error
        finally:
            if not self._pure:
                self.known.clear()


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Return the part of a HEADERS frame that belongs to the block."""
    start, end = 0, len(payload)
    if flags & Flag.PADDED:
        start = 1
        end -= payload[0] if payload else 1
    if flags & Flag.PRIORITY:
        start += 5
    if end < start:
        raise FrameError(Code.PROTOCOL_ERROR, "bad_padding")
    return payload[start:end]


def read_request(fields: Iterable[tuple[bytes, bytes]]) -> Request:
    """Read a request from its headers. Raises MalformedRequestError if they are not a request."""
    pseudo: dict[bytes, bytes] = {}
    found: dict[bytes, bytes] = {}
    for name, value in fields:
        if name[:1] == b":":
            if found or name not in _PSEUDO or name in pseudo or _BAD_VALUE(value):
                raise MalformedRequestError("pseudo-header fields")
            pseudo[name] = value
            continue
        check_field(name, value)
        if name == b"content-length" and found.get(name, value) != value:
            raise MalformedRequestError("content-length")
        found[name] = value
    if not all(pseudo.get(name) for name in _NEEDED):
        raise MalformedRequestError("pseudo-header fields")
    length = found.get(b"content-length")
    if length is not None and not (length.isdigit() and len(length) < 19):
        raise MalformedRequestError("content-length")
    return Request(
        path=pseudo[b":path"].decode("latin-1"),
        refuse_status=_refuse_status(pseudo[b":method"], found.get(b"content-type", b"")),
        declared_bytes=None if length is None else int(length),
        traceparent=found.get(b"traceparent", b"").decode("latin-1"),
    )


def _refuse_status(method: bytes, content_type: bytes) -> int:
    kind = content_type.lower()
    if kind != b"application/grpc" and not kind.startswith((b"application/grpc+", b"application/grpc;")):
        return 415
    return 0 if method == b"POST" else 405


def check_field(name: bytes, value: bytes) -> None:
    """Check a field that is no pseudo-header field. Raises MalformedRequestError."""
    if not _NAME(name) or _BAD_VALUE(value) or value[:1] in (b" ", b"\t") or value[-1:] in (b" ", b"\t"):
        raise MalformedRequestError("field")
    if name in _OF_A_CONNECTION or (name == b"te" and value.lower() != b"trailers"):
        raise MalformedRequestError("connection-specific field")
