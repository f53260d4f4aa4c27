"""Reads what routing needs out of headers and hints, and collects the pieces of a body within a bound that
all requests share. Pure.

Header names are matched in any case. The values of a repeated header are joined by commas, as HTTP says.
Values that cannot be read are skipped here, and `stream` decides what to do. Nothing in this module raises an
error because of a peer's bytes.

A `Body` belongs to one stream. The `BodyRoom` belongs to all streams of a process. Invariant: the size in the
room is the sum of the sizes of its bodies. A body that was taken or dropped has size 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epp.config.flow import Flow
from epp.config.policy import PolicySpec
from epp.extproc.events import PLAIN, Action, BodyMode, Echo, RequestBody, Slot
from epp.gate import NO_CLAIM, Claim
from epp.request.names import MAX_TENANT_CHARS, bounded_name
from epp.types import SERVER_HEADERS, Address, Endpoint, Entry

DESTINATION: Final = "x-gateway-destination-endpoint"
REQUEST_ID: Final = "x-request-id"
LENGTH: Final = "content-length"
DECISION: Final = "x-prefix-gateway-decision"
TEST_SELECTION: Final = "test-epp-endpoint-selection"
TEST_SERVED: Final = "x-conformance-test-served-endpoint"

OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers that name an InferenceObjective. The second is the older name."""
TTFT_MS: Final = "x-llm-d-slo-ttft-ms"

TRACEPARENT: Final = "traceparent"
_MAX_TRACEPARENT_CHARS: Final = 128
"""Version 00 has 55 characters, and a later version may add fields."""

RESPONSE_NAMES: Final = frozenset((":status", "content-type", "content-encoding"))
RESERVED: Final = (DESTINATION, *SERVER_HEADERS)
"""Request headers that only the picker may set."""
_RESERVED: Final = frozenset(RESERVED)
_REQUEST_NAMES: Final = _RESERVED.union(
    (":method", ":path", REQUEST_ID, "content-length", "content-encoding", TEST_SELECTION)
)
_MAX_REQUEST_ID_CHARS: Final = 256


def request_names(spec: PolicySpec, *, read: Flow | None = None, traced: bool = False) -> frozenset[str]:
    """Return the request headers that the picker reads. A transport may leave out all others. read: see
    `Gate.read`.
    """
    names = _REQUEST_NAMES | {spec.session_header, spec.debug_header, TRACEPARENT if traced else ""} - {""}
    flow = _claimed(spec, read)
    if flow is None:
        return names
    return names.union(OBJECTIVES, (TTFT_MS, flow.tenant_header))


def collect(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the names in lower case. Several values of one name are joined by commas."""
    found = dict(headers)
    if len(found) == len(headers) and "".join(found).islower():
        return found  # the usual case
    found.clear()
    for name, value in headers:
        key = name.lower()
        found[key] = f"{found[key]},{value}" if key in found else value
    return found


class RequestHead(Entry):
    """What the request headers say. The state machine holds one for each request."""

    path: str
    """Empty: the data plane sends no pseudo-headers, so the body has to show the API."""
    request_id: str
    """Empty: no request id came."""
    declared_bytes: int
    """Content-Length; 0 if it is absent or not a number."""
    encoded: bool
    """The body is compressed, so it cannot be read."""
    reserved: tuple[str, ...]
    """The headers of `RESERVED` that the client sent, and the objectives and deadlines that the policy does
    not believe. They must not reach a server.
    """
    session: str
    debug: bool
    prescribed: str
    trace: str = ""
    """A trace context, not yet checked. It is read only if tracing is on."""
    claim: Claim = NO_CLAIM

    def forget(self) -> None:
        """Forget what only the pick needs: the stream may stay open for long, and clients choose how much
        this is.
        """
        self.path = self.session = self.prescribed = ""
        self.claim = NO_CLAIM


def read_head(
    headers: Sequence[tuple[str, str]], spec: PolicySpec, *, read: Flow | None = None
) -> RequestHead:
    found, flow = collect(headers), _claimed(spec, read)
    length = found.get("content-length", "")
    session = found.get(spec.session_header, "")
    return RequestHead(
        path=found.get(":path", ""),
        request_id=found.get(REQUEST_ID, "").strip()[:_MAX_REQUEST_ID_CHARS],
        declared_bytes=int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0,
        encoded=found.get("content-encoding", "").strip().lower() not in ("", "identity"),
        reserved=_to_remove(found, spec.flow),
        session=session and bounded_name(session),
        debug=bool(spec.debug_header) and spec.debug_header in found,
        prescribed=found.get(TEST_SELECTION, ""),
        trace=bounded_trace(found.get(TRACEPARENT, "")),
        claim=NO_CLAIM if flow is None else _claim(found, flow),
    )


def _to_remove(found: Mapping[str, str], flow: Flow) -> tuple[str, ...]:
    """See `RequestHead.reserved`."""
    removed = () if _RESERVED.isdisjoint(found) else tuple(name for name in RESERVED if name in found)
    if flow.mode == "Hold":
        for claim, names in (("Objective", OBJECTIVES), ("Deadline", (TTFT_MS,))):
            if claim not in flow.claims:
                removed += tuple(name for name in names if name in found)
    return removed


def not_set(reserved: tuple[str, ...], headers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the reserved headers that a client sent and that the picker does not overwrite. They have to be
    removed.
    """
    return reserved and tuple(name for name in reserved if name not in {name for name, _ in headers})


def bounded_trace(text: str) -> str:
    """Return the text, or nothing if it is too long to be a trace context: streams keep it for as long as
    they live.
    """
    return text if len(text) <= _MAX_TRACEPARENT_CHARS else ""


def _claimed(spec: PolicySpec, read: Flow | None) -> Flow | None:
    """Return the flow control whose headers are read. This is the flow control of the policy in force if it
    holds requests.
    """
    return spec.flow if spec.flow.mode == "Hold" else read


def _claim(found: Mapping[str, str], flow: Flow) -> Claim:
    """Return what the headers claim about a request's place in a queue. Headers that cannot be read count as
    absent.
    """
    claims = flow.claims
    milliseconds = found.get(TTFT_MS, "").strip() if "Deadline" in claims else ""
    readable = milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) < 9
    return Claim(
        objective=next((bounded_name(found[name].strip()) for name in OBJECTIVES if name in found), "")
        if "Objective" in claims
        else "",
        tenant=bounded_name(found.get(flow.tenant_header, "").strip(), most_chars=MAX_TENANT_CHARS)
        if "Tenant" in claims
        else "",
        path=found.get(":path", "").partition("?")[0] if flow.paths else "",
        ttft_s=int(milliseconds) / 1000 if readable else None,
    )


def read_status(text: str) -> int:
    """Return an HTTP status; 0 if the text is not a status."""
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0


_LONGEST_ADDRESS: Final = 80
"""Longer text is not an address, and is not cached."""


def read_address(text: str) -> Address | None:
    """Return the address from `ip:port`; None for anything else."""
    return _read_address(text) if len(text) <= _LONGEST_ADDRESS else None


@functools.lru_cache(maxsize=4096)
def _read_address(text: str) -> Address | None:
    """Cached, since a fleet's addresses come again with every request."""
    try:
        return Address.parse(text)
    except ValueError:
        return None


def read_addresses(entries: Iterable[str]) -> frozenset[Address]:
    """Return every well-formed address in the entries. Each entry may be a comma list."""
    found = (read_address(part.strip()) for entry in entries for part in entry.split(","))
    return frozenset(address for address in found if address is not None)


def read_prescribed(text: str, endpoints: Sequence[Endpoint]) -> tuple[Address, ...]:
    """Return the list of addresses that a test prescribes, in its order. An address without a port means
    every endpoint on that host.
    """
    chosen: list[Address] = []
    for part in (p.strip() for p in text.split(",")):
        address = read_address(part)
        host = part.strip("[]")
        chosen += [address] if address else [e.address for e in endpoints if e.address.host == host]
    return tuple(dict.fromkeys(chosen))


# -- bodies ----------------------------------------------------------------------------------------------

MAX_PIECE_BYTES: Final = 62_000
"""The most bytes in one piece of an echoed body: the limit of the endpoint picker protocol."""
_BLANK: Final = b" \t\r\n\xef\xbb\xbf"


class BodyRoom:
    """Counts the bytes of incomplete bodies, which may not exceed a bound."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Body:
    """The pieces of one body so far. A piece that is the whole body is not copied."""

    __slots__ = ("_buffer", "_end", "_room", "ended", "pieces", "size_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._buffer: bytes | memoryview | bytearray = b""
        self._end: JsonEnd | None = None
        self.pieces = 0
        """Pieces since the last `take`."""
        self.size_bytes = 0
        """Bytes of all pieces so far, taken or not."""
        self.ended = False
        """The request has ended, so no more pieces come."""

    def add(self, piece: bytes | memoryview) -> bool:
        """Add the next piece. False: all bodies together exceed the bound. The piece is kept all the same."""
        size = len(piece)
        self.pieces += 1
        self.size_bytes += size
        self._room.held_bytes += size
        if not self._buffer:
            self._buffer = piece
        else:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += piece
        return self._room.held_bytes <= self._room.max_bytes

    def looks_whole(self, piece: bytes | memoryview, *, declared_bytes: int = 0) -> bool:
        """Return whether the body is complete, by its declared size or by its JSON, so that later pieces
        could not matter. Call this with each piece, once, in order.

        If the data plane keeps trailers to itself, nothing marks the end of a body before them.
        """
        if declared_bytes:
            return self.size_bytes >= declared_bytes
        if self._end is None:
            self._end = JsonEnd()
        return self._end.feed(bytes(piece))

    def take(self) -> bytes | memoryview:
        """Return all pieces that are held, and hold them no longer."""
        buffer = self._buffer
        self.drop()
        return memoryview(buffer) if isinstance(buffer, bytearray) else buffer

    def drop(self) -> None:
        if self._buffer:
            self._room.held_bytes -= len(self._buffer)
            self._buffer = b""
        self.pieces = 0

    def __len__(self) -> int:
        return len(self._buffer)


class JsonEnd:
    """Finds the end of a JSON object that comes in pieces of any size. The work is proportional
    to the bytes.
    """

    __slots__ = ("_carry", "_depth", "_in_string", "_started")

    def __init__(self) -> None:
        self._carry = b""
        """The last piece ended with a backslash, which escapes the first character of the next piece."""
        self._depth = 0
        self._in_string = False
        self._started = False

    def feed(self, piece: bytes) -> bool:
        """Return whether the object is complete, or the body is not a JSON object at all."""
        data = self._carry + piece
        if not self._started:
            data = data.lstrip(_BLANK)
            if not data:
                return False
            self._started = True
            if not data.startswith(b"{"):
                return True
        bare = data.replace(b"\\\\", b"")
        self._carry = b"\\" if bare.endswith(b"\\") else b""
        parts = bare.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        between = b"".join(parts[self._in_string :: 2])
        self._depth += between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")
        self._in_string ^= len(parts) % 2 == 0
        return self._depth <= 0 and not self._in_string


def passed_on(event: RequestBody, mode: BodyMode) -> Sequence[Action]:
    """Pass on unchanged a piece of a request's body that is no longer read."""
    if mode.echoed:
        return pieces(Slot.REQUEST_BODY, event.data, end_of_stream=event.end_of_stream)
    return PLAIN[Slot.REQUEST_BODY]


def pieces(slot: Slot, data: bytes | memoryview, *, end_of_stream: bool) -> Sequence[Echo]:
    """Return the same bytes in order, in pieces that the protocol allows. An end without bytes is one empty
    piece.
    """
    if len(data) <= MAX_PIECE_BYTES:
        return (Echo(slot, data, end_of_stream=end_of_stream),) if data or end_of_stream else ()
    view, last = memoryview(data), (len(data) - 1) // MAX_PIECE_BYTES * MAX_PIECE_BYTES
    return tuple(
        Echo(slot, view[start : start + MAX_PIECE_BYTES], end_of_stream=end_of_stream and start == last)
        for start in range(0, len(data), MAX_PIECE_BYTES)
    )
