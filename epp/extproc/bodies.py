"""What can be said of a request body's bytes: what they ask for, whether they are all there, and how they are sent on.

Pure functions of `stream`; nothing here remembers anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from epp.errors import BadRequestError
from epp.extproc.events import Echo, Slot
from epp.request.parse import parse_request, skim_request
from epp.types import ApiKind, InferenceRequest

MAX_PIECE_BYTES: Final = 62_000
"""Of an echoed body; the endpoint picker protocol's limit."""

NO_BODY: Final = InferenceRequest(kind=ApiKind.OTHER)
ENCODED: Final = InferenceRequest(kind=ApiKind.OTHER, unread="encoded_body")
"""Compressed in a way that is not read."""
PARTIAL: Final = InferenceRequest(kind=ApiKind.OTHER, unread="partial_body")
"""The data plane hands over no more than the start of it."""
OVERLOADED: Final = InferenceRequest(kind=ApiKind.OTHER, unread="overload")
"""The picker has too much to do to read it."""
NOT_SEEN: Final = InferenceRequest(kind=ApiKind.OTHER, unread="body_not_seen")
"""The data plane wants to know the server before it hands over the body."""
NO_ROOM: Final = InferenceRequest(kind=ApiKind.OTHER, unread="no_room")
"""All bodies together are over `streams.maxHeldBodyBytes`."""


def read_body(path: str, body: bytes | memoryview, *, partial: bool) -> InferenceRequest:
    """What a body asks for. BadRequestError, unless it may be only the first part of one."""
    try:
        return parse_request(path, body)
    except BadRequestError:
        if partial:
            return PARTIAL
        raise


def skim_body(path: str, body: bytes | memoryview, *, partial: bool) -> InferenceRequest:  # noqa: ARG001 - as `read_body`
    """Of a body that there is no time to read: which API and which model."""
    return skim_request(path, body, unread=OVERLOADED.unread)


def pieces(slot: Slot, data: bytes | memoryview, *, end_of_stream: bool) -> Sequence[Echo]:
    """The same bytes in order, in pieces that the protocol allows; an end without bytes is one empty piece."""
    if len(data) <= MAX_PIECE_BYTES:
        return (Echo(slot, data, end_of_stream=end_of_stream),) if data or end_of_stream else ()
    view, last = memoryview(data), (len(data) - 1) // MAX_PIECE_BYTES * MAX_PIECE_BYTES
    return tuple(
        Echo(slot, view[start : start + MAX_PIECE_BYTES], end_of_stream=end_of_stream and start == last)
        for start in range(0, len(data), MAX_PIECE_BYTES)
    )
