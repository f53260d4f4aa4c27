"""What the data plane tells about one HTTP request, and what is told back: plain values, no gRPC and no protobuf.

The border between a transport (`codec`, `server`) and the state machine (`stream`): another transport needs only to make
these events and carry out these actions. Header names may come in any case and more than once; values are text, one
character a byte (latin-1), so that no header is ever undecodable.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct


class BodyMode(enum.IntEnum):
    """How the data plane hands over a body; the numbers are those of ext_proc's ProcessingMode.BodySendMode."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5

    @property
    def echoed(self) -> bool:
        """The picker must send the body itself back, for the data plane keeps no copy."""
        return self >= BodyMode.FULL_DUPLEX_STREAMED


class Modes(Struct, frozen=True):
    """The processing mode, said by newer data planes in their first message of a stream."""

    request_body: BodyMode = BodyMode.NONE
    response_body: BodyMode = BodyMode.NONE
    early_body: bool = False
    """Chunks of a STREAMED body come before the headers are answered."""


class RequestHeaders(Struct, frozen=True, gc=False):
    headers: Sequence[tuple[str, str]]
    end_of_stream: bool = False
    subset: tuple[str, ...] | None = None
    """Raw entries of the subset hint, each perhaps a comma list; None: no hint came."""
    modes: Modes | None = None


class RequestBody(Struct, frozen=True, gc=False):
    data: bytes | memoryview
    """Perhaps a view of the message that it came in: a long prompt is not copied on its way to the parser."""
    end_of_stream: bool = False
    modes: Modes | None = None


class RequestTrailers(Struct, frozen=True, gc=False):
    pass


class ResponseHeaders(Struct, frozen=True, gc=False):
    headers: Sequence[tuple[str, str]]
    end_of_stream: bool = False
    served: str = ""
    """Who really served, as the data plane says it; empty: it does not."""
    modes: Modes | None = None


class ResponseBody(Struct, frozen=True, gc=False):
    data: bytes
    end_of_stream: bool = False
    modes: Modes | None = None


class ResponseTrailers(Struct, frozen=True, gc=False):
    pass


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers


class Slot(enum.Enum):
    """Which message an answer belongs to; the values are the field names of ext_proc's ProcessingResponse."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"

    # By identity, in C: the enum's own is a Python call for each lookup of an answer.
    __hash__ = object.__hash__


class Estimate(Struct, frozen=True):
    """What a request was estimated to cost at its pick."""

    prompt_tokens: int
    matched_tokens: int
    predicted_s: float


class Answer(Struct, frozen=True, gc=False):
    """Go on, perhaps with changes. Hashable, so that a transport may keep what it serialised."""

    slot: Slot
    set_headers: tuple[tuple[str, str], ...] = ()
    """Overwrite or add; not for trailers."""
    remove_headers: tuple[str, ...] = ()
    clear_route_cache: bool = False
    destination: str = ""
    """For the dynamic metadata; empty: none is sent."""
    scores: tuple[tuple[str, float], ...] = ()
    """For the dynamic metadata: destination and its score."""
    cost: Estimate | None = None
    """For the dynamic metadata."""
    body: bytes | None = None
    """In place of the request's body, whole; None: it goes on as it came."""
    stream_response: bool = False
    """Ask, for this request alone, that the answer's body be streamed here."""


class Echo(Struct, frozen=True, gc=False):
    """One piece of a body that goes on as it came."""

    slot: Slot
    data: bytes | memoryview
    end_of_stream: bool = False


class Refuse(Struct, frozen=True, gc=False):
    """Answer the client now, mostly with an error; nothing goes to any server."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    reason: str


class Delay(Struct, frozen=True, gc=False):
    """The answer comes later: the data plane shall wait so long for it."""

    seconds: float


Action = Answer | Echo | Refuse | Delay


class StreamProtocolError(Exception):
    """The data plane sent what cannot follow what came before. `reason` labels a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
