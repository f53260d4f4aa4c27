"""Turns ext_proc's messages into events, and actions into messages.

Only the fields that routing needs are read. `_wire` (C) cuts headers and bodies out of the usual messages,
since protobuf would make an object for each header and copy each body twice. It steps over each field by its
length and never searches, so no value can look like another header. The bytes around the headers repeat, so
their meaning is cached. `by_protobuf` decodes messages of an unusual form. Most answers differ only in the
servers that they name, which are put into the bytes of an earlier answer. Header values travel as latin-1
text inside the picker.

All that a message has beside a body is bounded in bytes and in fields, and both are counted before anything
is decoded. So no message holds the event loop for long.

Pure. Called by `conversation`.
"""

from __future__ import annotations

import functools
from typing import Final

from epp.protocol import _wire, by_protobuf
from epp.protocol.bodies import MAX_PIECE_BYTES
from epp.protocol.by_protobuf import Around
from epp.protocol.header_names import DESTINATION
from epp.protocol.http_events import (
    Action,
    Answer,
    Echo,
    Event,
    RequestBody,
    RequestHeaders,
    ResponseBody,
    ResponseHeaders,
    Slot,
    StreamProtocolError,
)

MOST_BYTES: Final = 256 * 1024
"""The most bytes of a message beside its body. Envoy's header fields have 60 KiB at most, and a subset hint
of 4,000 addresses has some 100 KB.
"""
MOST_FIELDS: Final = 8_192
"""The most fields of a message, those inside of its fields included. A header field counts once, an address
in a list of addresses twice.
"""

# Wire tags: field number times eight plus the wire type.
_REQUEST_HEADERS_TAG: Final = 0x12
_RESPONSE_HEADERS_TAG: Final = 0x1A
_REQUEST_BODY_TAG: Final = 0x22
_RESPONSE_BODY_TAG: Final = 0x2A
_METADATA_TAG: Final = 0x42
_ATTRIBUTES_TAG: Final = 0x4A
_CONFIG_TAG: Final = 0x5A
_AROUND: Final = frozenset((_METADATA_TAG, _ATTRIBUTES_TAG, _CONFIG_TAG))

_SHORTEST_ADDRESS: Final = len("[::]:1")
_KEPT_BYTES: Final = 512
"""Longer pieces are not cached: they hold more than an address or two, and may differ with every request."""


def decode(data: bytes, *, names: frozenset[str], response_names: frozenset[str]) -> Event:
    """Decode one ProcessingRequest. Of the headers, only those in `names` and `response_names` are kept.
    Raises StreamProtocolError.
    """
    tag = data[0] if data else 0
    event: Event | None = None
    if tag in (_REQUEST_BODY_TAG, _RESPONSE_BODY_TAG):
        event = _cut_body(data)
    if event is None:
        _require_bounded(data)
        if tag == _REQUEST_HEADERS_TAG:
            event = _cut_request_headers(data, names)
        elif tag == _RESPONSE_HEADERS_TAG:
            event = _cut_response_headers(data, response_names)
    return event or by_protobuf.decode(data, names=names, response_names=response_names)


def _require_bounded(data: bytes) -> None:
    """Raise StreamProtocolError if bytes without a body hold too much to be decoded."""
    if len(data) > MOST_BYTES:
        raise StreamProtocolError("message_too_large")
    fields = _wire.count_fields(data, MOST_FIELDS)
    if not 0 <= fields <= MOST_FIELDS:
        raise StreamProtocolError("undecodable" if fields < 0 else "too_many_fields")


echoes_in: Final = functools.partial(_wire.echoes_in, MAX_PIECE_BYTES)
"""Takes all messages of a DATA frame at once, with gRPC's heads, and returns the answers that pass on these
pieces of a response's body unchanged. None: some message must be decoded.
"""


def _cut_body(data: bytes) -> RequestBody | ResponseBody | None:
    found = _wire.body_of(data)
    if found is None:
        return None
    start, end, end_of_stream, rest = found
    around = _around(data[rest:])
    if around is None:
        return None
    if data[0] == _REQUEST_BODY_TAG:
        return RequestBody(memoryview(data)[start:end], end_of_stream, around[2])
    return ResponseBody(data[start:end], end_of_stream, around[2])


def _cut_request_headers(data: bytes, names: frozenset[str]) -> RequestHeaders | None:
    read = _wire.headers_of(data, _readable(names))
    if read is None:
        return None
    headers, end_of_stream, end = read
    around = _around(data[end:])
    if around is None:
        return None
    subset, _, modes, _ = around
    return RequestHeaders(headers, end_of_stream, subset, modes)


def _cut_response_headers(data: bytes, names: frozenset[str]) -> ResponseHeaders | None:
    """Decode response headers field by field, because the metadata hold the fallback list, and a large fleet
    has very many such lists.
    """
    read = _wire.headers_of(data, _readable(names))
    if read is None:
        return None
    headers, end_of_stream, end = read
    parts = _wire.fields_of(data, end)
    if parts is None or not _AROUND.issuperset(parts):
        return None
    # The attributes decide if they name the server. The metadata are read only if the attributes do not.
    served, lost = "", 0
    for tag in (_ATTRIBUTES_TAG, _METADATA_TAG):
        around = _around(parts.get(tag, b""))
        if around is None:
            return None
        if around[1] is not None:
            served, lost = around[1], around[3]
            break
    around = _around(parts.get(_CONFIG_TAG, b""))
    if around is None:
        return None
    return ResponseHeaders(headers, end_of_stream, served, around[2], lost)


def _around(data: bytes) -> Around | None:
    """Return the parts around a main part. None: the bytes are broken, or hold more than the known fields."""
    if len(data) <= _KEPT_BYTES:
        return _kept_around(data)
    _require_bounded(data)
    return by_protobuf.around(data)


_kept_around = functools.lru_cache(maxsize=4096)(by_protobuf.around)


@functools.lru_cache(maxsize=16)
def _readable(names: frozenset[str]) -> tuple[str, ...]:
    """Return the names that `_wire` can look for: the names in lower-case ASCII. If a message holds a name
    with other letters, protobuf reads the message.
    """
    return tuple(name for name in names if name.isascii() and name == name.lower())


def encode(action: Action) -> bytes:
    """Encode one ProcessingResponse."""
    if isinstance(action, Answer) and _only_names_servers(action):
        return _from_template(action)
    if isinstance(action, Echo):
        return _wire.echo(action.slot is Slot.RESPONSE_BODY, action.data, action.end_of_stream)
    return by_protobuf.encode(action)


def _only_names_servers(answer: Answer) -> bool:
    """Return whether the answer only names servers, or nothing, and names the same servers in each place."""
    if answer.body is not None or answer.cost is not None:
        return False
    named, headers = answer.destination, answer.set_headers
    if headers != (((DESTINATION, named),) if named else ()):
        return False
    return not named or (_SHORTEST_ADDRESS <= len(named) <= _KEPT_BYTES and named.isascii())


def _from_template(answer: Answer) -> bytes:
    """Return the bytes of an earlier answer with the names of these servers put in. Protobuf takes
    five times as long, and a large fleet has so many lists of fallbacks that the same list seldom comes
    again.
    """
    named = answer.destination
    around = _template(answer.slot, len(named), answer.remove_headers, answer.stream_response)
    return named.encode().join(around)


@functools.lru_cache(maxsize=4096)
def _template(
    slot: Slot,
    size: int,
    remove_headers: tuple[str, ...],
    stream_response: bool,  # noqa: FBT001 - a key
    /,
) -> tuple[bytes, ...]:
    """Return the bytes around the names of servers. size: the length of these names. 0: the answer names
    none.
    """
    named = "\0" * size  # these bytes occur nowhere else in an answer
    whole = by_protobuf.encode(
        Answer(
            slot,
            set_headers=((DESTINATION, named),) if named else (),
            remove_headers=remove_headers,
            destination=named,
            stream_response=stream_response,
        )
    )
    return tuple(whole.split(named.encode())) if named else (whole,)
