"""Header blocks: their frames, HPACK by the `hpack` library, and the headers of a request that a gRPC server
needs. Pure.

A data plane opens thousands of streams with the same headers, and decoding them each time would be most of
the cost of a stream. When the peer has reduced its dynamic table to size 0, as our SETTINGS ask, a block
always means the same. So the decoded headers of a bounded number of short blocks are cached. Older clients
never reduce the table and keep its usual size, which is allowed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Final, cast
from urllib.parse import quote

from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple, OversizedHeaderListError
from msgspec import Struct

from epp.transport.http2.frames import Code, Flag, FrameError, Kind, Limits

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
    """The decoder of one connection. It must get every block once, in the order of the wire. A block that
    cannot be decoded is a FrameError: no later block could be decoded either.
    """

    def __init__(self, *, max_list_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=max_list_bytes)
        self.known: dict[bytes, Request] = {}
        """Requests by their blocks, which need not be decoded again. Empty unless the peer's table has size
        0, so that a block always means the same."""

    def request(self, block: bytes) -> Request:
        """Read the header block of a request that is not `known`. Raises MalformedRequestError."""
        pure = self._pure
        request = read_request(self._decode(block))
        if pure and self._pure and len(block) <= _KEPT_BYTES:
            if len(self.known) >= _KEPT_BLOCKS:
                self.known.clear()
            self.known[block] = request
        return request

    def trailers(self, block: bytes) -> None:
        """Read the block after a body, only to keep the decoder right. Raises MalformedRequestError."""
        for name, value in self._decode(block):
            _check_field(name, value)

    def skip(self, block: bytes) -> None:
        """Read a block of a stream that is gone."""
        self._decode(block)

    @property
    def _pure(self) -> bool:
        return bool(self._decoder.header_table_size == 0)

    def _decode(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
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


class HeaderParts:
    """The header block that is not complete yet, if it does not come as one plain HEADERS frame. No other
    frame may come before its end. The size of a block and the number of its frames are bounded.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.since: float | None = None
        """When the unfinished block began. None: there is none."""
        self.number = 0
        """The stream of the latest block."""
        self.ends = False
        """Whether this block ends the peer's side of the stream."""
        self._block = b""
        self._frames = 0

    def take(self, kind: int, flags: int, number: int, payload: bytes, *, now: float) -> bytes | None:
        """Add a HEADERS or CONTINUATION frame. Returns the block if it is complete. Raises FrameError."""
        if kind == Kind.HEADERS:
            self._block, self._frames = _unpadded(flags, payload), 1
            self.number, self.ends, self.since = number, bool(flags & Flag.END_STREAM), now
        elif self.since is None:
            raise FrameError(Code.PROTOCOL_ERROR, "broken_header_block")
        else:
            self._block += payload
            self._frames += 1
        if self._frames > self._limits.max_header_frames:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "continuation_flood")
        if len(self._block) > self._limits.max_header_bytes:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "header_list_too_large")
        if not flags & Flag.END_HEADERS:
            return None
        block, self._block, self.since = self._block, b"", None
        return block


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
        _check_field(name, value)
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


def _check_field(name: bytes, value: bytes) -> None:
    if not _NAME(name) or _BAD_VALUE(value) or value[:1] in (b" ", b"\t") or value[-1:] in (b" ", b"\t"):
        raise MalformedRequestError("field")
    if name in _OF_A_CONNECTION or (name == b"te" and value.lower() != b"trailers"):
        raise MalformedRequestError("connection-specific field")


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header block without the dynamic table, so the same bytes mean the same on every
    connection.
    """
    never = [NeverIndexedHeaderTuple(name.encode(), value.encode()) for name, value in fields]
    return Encoder().encode(never, huffman=False)


_PRINTABLE: Final = bytes(range(0x20, 0x7F)).replace(b"%", b"")
"""The characters that `grpc-message` has as they are."""
GRPC_RESPONSE: Final = encode(((":status", "200"), ("content-type", "application/grpc")))


@functools.lru_cache(maxsize=64)
def trailers(status: int, details: str, *, alone: bool) -> bytes:
    """Return the trailers of a call. alone: no response headers were sent before them."""
    fields = [(":status", "200"), ("content-type", "application/grpc")] if alone else []
    fields.append(("grpc-status", str(status)))
    if details:
        fields.append(("grpc-message", quote(details, safe=_PRINTABLE)))
    return encode(fields)


_NO_CALL: Final = b"This port speaks gRPC alone: POST, with content-type application/grpc.\n"


@functools.lru_cache(maxsize=16)
def refusal(http_status: int) -> tuple[bytes, bytes]:
    """Return the header block and the body of the answer to a stream that is not a gRPC call."""
    fields = (
        (":status", str(http_status)),
        ("content-type", "text/plain"),
        ("content-length", str(len(_NO_CALL))),
    )
    return encode(fields), _NO_CALL
