"""The events that the data plane sends about one HTTP request, and the actions that answer them. These are
plain values without gRPC and protobuf.

They separate the transport (`codec`, `server`) from the state machine (`stream`): another transport only has
to make these events and carry out these actions. Header names may come in any case and more than once; values
are text, one character a byte (latin-1), so that no header is ever undecodable.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from msgspec import Struct


class BodyMode(enum.IntEnum):
    """How the data plane hands over a body, and when the pick is made;
    the numbers are those of ext_proc's ProcessingMode.BodySendMode.
    """

    NONE = 0
    """Routed by load, from the headers. So are requests without a body."""
    STREAMED = 1
    """With early body (`send_body_without_waiting_for_header_response`), the header answer waits for the
    body, but only for `streamed_hold_bytes`: the data plane stops reading at its own buffer limit, and
    waiting beyond it ended in a 504 (seen on Envoy 1.40). A longer body is routed by load. The body's end is
    where Content-Length or its JSON says, for an end in trailers may never be told. Without early body, the
    data plane sends no body before the headers are answered, and chooses the server as soon as they are. A
    prefix cannot be known then: routed by load. Later chunks are answered unread."""
    BUFFERED = 2
    """Headers are answered at once, the one body message with the pick. Bodies that end in trailers too."""
    BUFFERED_PARTIAL = 3
    """The same; a body cut at the data plane's limit is routed by load, since half a JSON says nothing."""
    FULL_DUPLEX_STREAMED = 4
    """The answer to the headers waits for the whole body, then come header answer, body pieces and trailers,
    in this order."""
    GRPC = 5
    """As full duplex."""

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

    @property
    def body_first(self) -> bool:
        """The body of a request is handed over before its server has to be known."""
        return self.request_body >= BodyMode.BUFFERED or (
            self.early_body and self.request_body is BodyMode.STREAMED
        )


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


PLAIN: Final = {slot: (Answer(slot),) for slot in Slot}
"""Go on without any change."""


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
