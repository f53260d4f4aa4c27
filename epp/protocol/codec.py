"""Turns ext_proc's messages into events, and actions into messages.

Only the fields that routing needs are read. `_wire` (C) cuts headers and bodies out of the usual messages,
since protobuf would make an object for each header and copy each body twice. It steps over each field by its
length and never searches, so no value can look like another header. The bytes around the headers repeat, so
their meaning is cached. Protobuf decodes messages of an unusual form. Most answers differ only in the servers
that they name, which are put into the bytes of an earlier answer. Header values travel as latin-1 text inside
the picker.

All that a message has beside a body is bounded in bytes before protobuf decodes it, and in header fields,
attributes and addresses before they are read one by one. So no message holds the event loop for long.

Pure. Called by `conversation`.
"""

import functools
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError

from epp.base.errors import DETAILS_PREFIX
from epp.protocol import _wire
from epp.protocol.header_names import DESTINATION, MOST_ADDRESSES, RESPONSE_NAMES
from epp.protocol.http_events import (
    MAX_PIECE_BYTES,
    Action,
    Answer,
    BodyMode,
    Delay,
    Headers,
    HttpEvent,
    Modes,
    Piece,
    Refuse,
    Slot,
    StreamProtocolError,
    Trailers,
)

MOST_BYTES: Final = 256 * 1024
"""The most bytes of a message beside its body. Envoy's header fields have 60 KiB at most, and a subset hint
of 4,000 addresses has some 100 KB. Protobuf takes at most 9 ms for so many bytes.
"""
MOST_HEADERS: Final = 4_096
MOST_ATTRIBUTES: Final = 64
"""The most filters that may send attributes along."""

# Wire tags: field number times eight plus the wire type.
_HEADERS_AT: Final = {0x12: Slot.REQUEST_HEADERS, 0x1A: Slot.RESPONSE_HEADERS}
_BODY_AT: Final = {0x22: Slot.REQUEST_BODY, 0x2A: Slot.RESPONSE_BODY}
_METADATA: Final = b"\x42"
"""The tag of the metadata."""

_SHORTEST_ADDRESS: Final = len("[::]:1")
_KEPT_BYTES: Final = 512
"""What is longer beside a main part is not cached: it may differ with every request."""

_LB_NAMESPACE: Final = "envoy.lb"
_SERVED_KEY: Final = f"{DESTINATION}-served"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET_KEY: Final = f"{DESTINATION}-subset"
_UPSTREAM: Final = "upstream.address"
_ATTEMPTS: Final = "upstream.request_attempt_count"
_MOST_ATTEMPTS: Final = 16
_RESPONSE_DETAILS: Final = "response.code_details"
_ENDED: Final = (
    "upstream_reset_before_response_started{connection_termination",
    "upstream_reset_before_response_started{remote_reset",
)
"""Details of an answer that Envoy makes itself after a server has taken a request. Other words stand there if
no server could be reached."""

_OVERWRITE: Final = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_SEND: Final = processing_mode_pb2.ProcessingMode.HeaderSendMode.SEND
_STREAMED: Final = processing_mode_pb2.ProcessingMode.BodySendMode.STREAMED

Around = tuple[Modes | None, tuple[str, ...] | None, str, int]
"""The parts of a message besides its main part: the last four fields of `Headers`."""
_NOTHING_AROUND: Final[Around] = (None, None, "", 0)


def decode(data: bytes, *, names: frozenset[str]) -> HttpEvent:
    """Decode one ProcessingRequest. Of a request's headers, only those in `names` are kept. Raises
    StreamProtocolError.
    """
    tag = data[0] if data else 0
    event: HttpEvent | None = None
    if (slot := _BODY_AT.get(tag)) is not None:
        event = _cut_body(slot, data)
    elif (slot := _HEADERS_AT.get(tag)) is not None:
        event = _cut_headers(slot, data, names)
    return event or _decode_any(data, names)


def _require_bounded(size_bytes: int) -> None:
    """Raise StreamProtocolError if bytes without a body are too many to be decoded."""
    if size_bytes > MOST_BYTES:
        raise StreamProtocolError("message_too_large")


def _require_few(count: int, most: int) -> None:
    if count > most:
        raise StreamProtocolError("too_many_fields")


echoes_in: Final = functools.partial(_wire.echoes_in, MAX_PIECE_BYTES)
"""Takes all messages of a DATA frame at once, with gRPC's heads, and returns the answers that pass on these
pieces of a response's body unchanged. None: some message must be decoded.
"""


def _cut_body(slot: Slot, data: bytes) -> Piece | None:
    found = _wire.body_of(data)
    around = None if found is None else _around(data, found[3])
    if found is None or around is None:
        return None
    start, end, end_of_stream, _ = found
    return Piece(slot, memoryview(data)[start:end], end_of_stream, around[0])


def _cut_headers(slot: Slot, data: bytes, names: frozenset[str]) -> Headers | None:
    _require_bounded(len(data))
    answers = slot is Slot.RESPONSE_HEADERS
    found = _wire.headers_of(data, _readable(RESPONSE_NAMES if answers else names))
    if found is None:
        return None
    headers, end_of_stream, at = found
    around = (_named(data[at:]) if answers else None) or _around(data, at)
    return None if around is None else Headers(slot, headers, end_of_stream, *around)


def _named(rest: bytes) -> Around | None:
    """Return the parts behind the metadata of a response, if they name its server. So the metadata are not
    read, which may hold a long subset hint. They come first: Envoy writes fields in the order of their tags.
    """
    size = 0
    for n, byte in enumerate(rest[1:4] if rest[:1] == _METADATA else b""):  # a bounded length has three bytes
        size |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            behind = rest[2 + n + size :]
            around = _kept_around(behind) if 0 < len(behind) <= _KEPT_BYTES else None
            return around if around is not None and around[2] else None
    return None


def _around(data: bytes, at: int) -> Around | None:
    """Return the parts around a main part, which ends at `at`. None: a second main part stands there, which
    no data plane sends. A long one is refused, so that no long message is decoded twice.
    """
    rest = data[at:]
    if not rest:
        return _NOTHING_AROUND
    return _kept_around(rest) if len(rest) <= _KEPT_BYTES else _read_around(rest)


def _read_around(data: bytes) -> Around | None:
    _require_bounded(len(data))
    message = _message(data)
    if message.WhichOneof("request") is None:
        return _beside(message)
    if len(data) > _KEPT_BYTES:
        raise StreamProtocolError("too_many_fields")
    return None


_kept_around = functools.lru_cache(maxsize=4096)(_read_around)


@functools.lru_cache(maxsize=16)
def _readable(names: frozenset[str]) -> tuple[str, ...]:
    """Return the names that `_wire` can look for: the names in lower-case ASCII. If a message holds a name
    with other letters, protobuf reads the message.
    """
    return tuple(name for name in names if name.isascii() and name == name.lower())


def _decode_any(data: bytes, names: frozenset[str]) -> HttpEvent:
    """Decode one ProcessingRequest of any form by protobuf."""
    _require_bounded(len(data))
    message = _message(data)
    kind = message.WhichOneof("request")
    if kind is None:
        raise StreamProtocolError("empty_message")
    slot, part, around = Slot(kind), getattr(message, kind), _beside(message)
    if slot in _HEADERS_AT.values():
        wanted = names if slot is Slot.REQUEST_HEADERS else RESPONSE_NAMES
        return Headers(slot, _headers(part.headers, wanted), part.end_of_stream, *around)
    if slot in _BODY_AT.values():
        return Piece(slot, part.body, part.end_of_stream, around[0])
    return Trailers(slot)


def _message(data: bytes) -> Any:
    try:
        return ext_proc.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise StreamProtocolError("undecodable") from error


def _beside(message: Any) -> Around:
    _require_few(len(message.attributes), MOST_ATTRIBUTES)
    return (
        _modes(message.protocol_config) if message.HasField("protocol_config") else None,
        _subset(message.metadata_context) if message.HasField("metadata_context") else None,
        _served(message),
        _lost(message),
    )


def _modes(config: Any) -> Modes:
    try:
        return Modes(BodyMode(config.request_body_mode), BodyMode(config.response_body_mode))
    except ValueError as error:
        raise StreamProtocolError("unknown_body_mode") from error


def _headers(header_map: Any, names: frozenset[str]) -> list[tuple[str, str]]:
    _require_few(len(header_map.headers), MOST_HEADERS)
    found = []
    for header in header_map.headers:
        name = header.key.lower()
        if name in names:
            raw: bytes = header.raw_value or header.value.encode()
            found.append((name, raw.decode("latin-1")))
    return found


def _subset(metadata: Any) -> tuple[str, ...] | None:
    """Return the entries of the subset hint. Empty: the hint is there, but has no text."""
    hint = metadata.filter_metadata.get(_SUBSET_NAMESPACE)
    value = None if hint is None else hint.fields.get(_SUBSET_KEY)  # an empty hint is false
    if value is None:
        return None
    if value.HasField("list_value"):
        return tuple(v.string_value for v in islice(value.list_value.values, MOST_ADDRESSES))
    return (value.string_value,)


def _lost(message: Any) -> int:
    """Return the number of servers that were tried, if the last one took the request and gave no answer."""
    for attributes in message.attributes.values():
        details = attributes.fields[_RESPONSE_DETAILS].string_value if attributes.fields else ""
        if details.startswith(_ENDED):
            return int(min(_MOST_ATTEMPTS, max(1, attributes.fields[_ATTEMPTS].number_value)))
    return 0


def _served(message: Any) -> str:
    """Return the server that served. The attribute is right after retries too, so it goes before the
    metadata. Empty: the message has neither.
    """
    for attributes in message.attributes.values():
        if _UPSTREAM in attributes.fields:
            return str(attributes.fields[_UPSTREAM].string_value)
    balancer = message.metadata_context.filter_metadata[_LB_NAMESPACE]
    return str(balancer.fields[_SERVED_KEY].string_value)


def encode(action: Action) -> bytes:
    """Encode one ProcessingResponse."""
    if isinstance(action, Answer) and _only_names_servers(action):
        return _from_template(action)
    if isinstance(action, Piece):
        return _wire.echo(action.slot is Slot.RESPONSE_BODY, action.data, action.end_of_stream)
    return _encode_any(action)


def _only_names_servers(answer: Answer) -> bool:
    """Return whether the answer only names servers, or nothing, and names the same servers in each place."""
    if answer.body is not None:
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
    whole = _encode_any(
        Answer(
            slot,
            set_headers=((DESTINATION, named),) if named else (),
            remove_headers=remove_headers,
            destination=named,
            stream_response=stream_response,
        )
    )
    return tuple(whole.split(named.encode())) if named else (whole,)


def _encode_any(action: Answer | Refuse | Delay) -> bytes:
    """Encode one ProcessingResponse by protobuf."""
    response = ext_proc.ProcessingResponse()
    if isinstance(action, Answer):
        _fill(response, action)
    elif isinstance(action, Delay):
        response.override_message_timeout.FromMilliseconds(int(1000 * action.seconds))
    else:
        immediate = response.immediate_response
        immediate.status.code = action.status
        immediate.body = action.body
        immediate.details = DETAILS_PREFIX + action.reason
        _set_headers(immediate.headers, action.headers)
    return bytes(response.SerializeToString())


def _fill(response: Any, answer: Answer) -> None:
    part = getattr(response, answer.slot.value)
    part.SetInParent()
    if answer.set_headers or answer.remove_headers:
        assert answer.slot not in (Slot.REQUEST_TRAILERS, Slot.RESPONSE_TRAILERS)
        mutation = part.response.header_mutation
        _set_headers(mutation, answer.set_headers)
        mutation.remove_headers.extend(answer.remove_headers)
    if answer.body is not None:
        part.response.body_mutation.body = answer.body
    if answer.destination:
        if answer.set_headers:  # The data plane may choose the route by them.
            part.response.clear_route_cache = True
        metadata = response.dynamic_metadata.fields[_LB_NAMESPACE].struct_value.fields
        metadata[DESTINATION].string_value = answer.destination
    if answer.stream_response:
        response.mode_override.response_header_mode = _SEND
        response.mode_override.response_body_mode = _STREAMED


def _set_headers(mutation: Any, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("latin-1", "replace")
