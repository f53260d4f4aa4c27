"""Turns ext_proc's protobuf messages into events, and actions into messages. No other module knows the wire
format.

The codec reads only the fields that routing needs. `wire` cuts headers and bodies out of the usual messages,
since protobuf would make an object for each header and copy each body twice. The bytes around the headers
repeat, so their meaning is cached. Messages of an unusual form are decoded by protobuf. Most answers differ
only in the servers that they name, which are put into the bytes of an earlier answer. Header values travel as
latin-1 text inside the picker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError

from epp.errors import DETAILS
from epp.extproc import wire
from epp.extproc.events import (
    Action,
    Answer,
    BodyMode,
    Delay,
    Echo,
    Event,
    Modes,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Slot,
    StreamProtocolError,
)
from epp.extproc.reading import DESTINATION, MAX_PIECE_BYTES

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

_LB_NAMESPACE: Final = "envoy.lb"
_SERVED_KEY: Final = f"{DESTINATION}-served"
_SCORES_KEY: Final = f"{DESTINATION}-scores"
_PROMPT_TOKENS_KEY: Final = "x-prefix-gateway-prompt-tokens"
_MATCHED_TOKENS_KEY: Final = "x-prefix-gateway-matched-tokens"
_PREDICTED_KEY: Final = "x-prefix-gateway-predicted-seconds"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET_KEY: Final = f"{DESTINATION}-subset"
_UPSTREAM: Final = "upstream.address"

_OVERWRITE: Final = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_SEND: Final = processing_mode_pb2.ProcessingMode.HeaderSendMode.SEND
_STREAMED: Final = processing_mode_pb2.ProcessingMode.BodySendMode.STREAMED

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


def decode(data: bytes, *, names: frozenset[str], response_names: frozenset[str], first: bool) -> Event:
    """Decode one ProcessingRequest. Of the headers, only those in `names` and `response_names` are kept.
    first: this is the first message of the stream, which may state the modes.
    """
    event = _by_hand(data, names=names, response_names=response_names, first=first) if data else None
    return event or _by_protobuf(data, names=names, response_names=response_names)


def _by_hand(
    data: bytes, *, names: frozenset[str], response_names: frozenset[str], first: bool
) -> Event | None:
    tag = data[0]
    if tag == _REQUEST_HEADERS_TAG:
        return _cut_request_headers(data, names)
    if tag == _RESPONSE_HEADERS_TAG:
        return _cut_response_headers(data, response_names)
    if not first and tag in (_REQUEST_BODY_TAG, _RESPONSE_BODY_TAG):
        return _cut_body(data)
    return None


def _by_protobuf(data: bytes, *, names: frozenset[str], response_names: frozenset[str]) -> Event:
    try:
        message = ext_proc.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise StreamProtocolError("undecodable") from error
    kind = message.WhichOneof("request")
    if kind is None:
        raise StreamProtocolError("empty_message")
    modes = _modes(message) if message.HasField("protocol_config") else None
    return _EVENTS[kind](message, names if kind == "request_headers" else response_names, modes)


def echo_of(data: bytes) -> bytes | None:
    """Return the answer that passes on a piece of a response's body unchanged. No object is made for the
    message or the answer. None: the message must be decoded.
    """
    found = wire.echo_of(data, MAX_PIECE_BYTES)
    if found is None:
        return None
    answer, rest = found
    return answer if rest == len(data) or _says_nothing_of_bodies(data[rest:]) else None


echoes_in: Final = functools.partial(wire.echoes_in, MAX_PIECE_BYTES)
"""`echo_of` for all messages of a DATA frame at once. Takes and returns messages with gRPC's heads."""


def _cut_body(data: bytes) -> RequestBody | ResponseBody | None:
    found = wire.body_of(data)
    if found is None:
        return None
    start, end, end_of_stream, rest = found
    if rest < len(data) and not _says_nothing_of_bodies(data[rest:]):
        return None
    if data[0] == _REQUEST_BODY_TAG:
        return RequestBody(memoryview(data)[start:end], end_of_stream)
    return ResponseBody(data[start:end], end_of_stream)


def _cut_request_headers(data: bytes, names: frozenset[str]) -> RequestHeaders | None:
    read = wire.headers_of(data, _readable(names))
    if read is None:
        return None
    headers, end_of_stream, end = read
    around = _around(data[end:])
    if around is None:
        return None
    subset, _, modes = around
    return RequestHeaders(headers, end_of_stream, subset, modes)


def _cut_response_headers(data: bytes, names: frozenset[str]) -> ResponseHeaders | None:
    """Decodes the message field by field, because the metadata hold the fallback list, and a large fleet has
    very many such lists.
    """
    read = wire.headers_of(data, _readable(names))
    if read is None:
        return None
    headers, end_of_stream, end = read
    parts = wire.fields_of(data, end)
    if parts is None or not _AROUND.issuperset(parts):
        return None
    # The attributes decide if they name the server. The metadata are read only if the attributes do not.
    served = ""
    for tag in (_ATTRIBUTES_TAG, _METADATA_TAG):
        around = _around(parts.get(tag, b""))
        if around is None:
            return None
        if around[1] is not None:
            served = around[1]
            break
    around = _around(parts.get(_CONFIG_TAG, b""))
    if around is None:
        return None
    return ResponseHeaders(headers, end_of_stream, served, around[2])


_Around = tuple[tuple[str, ...] | None, str | None, Modes | None]
"""What a message says besides its main part: the subset hint, the server that served (None: not stated), and
the modes.
"""


def _around(data: bytes) -> _Around | None:
    """None: the bytes are broken, or hold more than the known fields around a message's main part."""
    return _kept_around(data) if len(data) <= _KEPT_BYTES else _read_around(data)


def _says_nothing_of_bodies(data: bytes) -> bool:
    """Return whether the bytes around a body leave the meaning of the body unchanged."""
    around = _around(data)
    return around is not None and around[2] is None


def _read_around(data: bytes) -> _Around | None:
    try:
        message = ext_proc.ProcessingRequest.FromString(data)
    except DecodeError:
        return None
    if message.WhichOneof("request") is not None:
        return None
    return (
        _subset(message.metadata_context) if message.HasField("metadata_context") else None,
        _served(message),
        _modes(message) if message.HasField("protocol_config") else None,
    )


_kept_around = functools.lru_cache(maxsize=4096)(_read_around)


@functools.lru_cache(maxsize=16)
def _readable(names: frozenset[str]) -> tuple[str, ...]:
    """Return the names that `wire` can look for: those in lower-case ASCII. If a message holds a name with
    other letters, protobuf reads the message.
    """
    return tuple(name for name in names if name.isascii() and name == name.lower())


def _modes(message: Any) -> Modes:
    config = message.protocol_config
    return Modes(
        request_body=_body_mode(config.request_body_mode),
        response_body=_body_mode(config.response_body_mode),
        early_body=config.send_body_without_waiting_for_header_response,
    )


def _body_mode(number: int) -> BodyMode:
    try:
        return BodyMode(number)
    except ValueError as error:
        raise StreamProtocolError("unknown_body_mode") from error


def _headers(header_map: Any, names: frozenset[str]) -> list[tuple[str, str]]:
    found = []
    for header in header_map.headers:
        name = header.key.lower()
        if name in names:
            raw: bytes = header.raw_value or header.value.encode()
            found.append((name, raw.decode("latin-1")))
    return found


def _request_headers(message: Any, names: frozenset[str], modes: Modes | None) -> RequestHeaders:
    part = message.request_headers
    return RequestHeaders(
        _headers(part.headers, names),
        end_of_stream=part.end_of_stream,
        subset=_subset(message.metadata_context) if message.HasField("metadata_context") else None,
        modes=modes,
    )


def _subset(metadata: Any) -> tuple[str, ...] | None:
    """Return the entries of the subset hint. Empty: the hint is there, but has no text."""
    if _SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    values = metadata.filter_metadata[_SUBSET_NAMESPACE].fields
    if _SUBSET_KEY not in values:
        return None
    value = values[_SUBSET_KEY]
    if value.HasField("list_value"):
        return tuple(v.string_value for v in value.list_value.values)
    return (value.string_value,)


def _response_headers(message: Any, names: frozenset[str], modes: Modes | None) -> ResponseHeaders:
    part = message.response_headers
    return ResponseHeaders(
        _headers(part.headers, names),
        end_of_stream=part.end_of_stream,
        served=_served(message) or "",
        modes=modes,
    )


def _served(message: Any) -> str | None:
    """Return the server that served. The attribute counts retries, so it goes before the metadata. None:
    neither is there.
    """
    for attributes in message.attributes.values():
        if _UPSTREAM in attributes.fields:
            return str(attributes.fields[_UPSTREAM].string_value)
    metadata = message.metadata_context.filter_metadata
    if _LB_NAMESPACE in metadata:
        values = metadata[_LB_NAMESPACE].fields
        if _SERVED_KEY in values:
            return str(values[_SERVED_KEY].string_value)
    return None


_EVENTS: Final[dict[str, Callable[[Any, frozenset[str], Modes | None], Event]]] = {
    "request_headers": _request_headers,
    "request_body": lambda message, _, modes: RequestBody(
        message.request_body.body, end_of_stream=message.request_body.end_of_stream, modes=modes
    ),
    "request_trailers": lambda *_: RequestTrailers(),
    "response_headers": _response_headers,
    "response_body": lambda message, _, modes: ResponseBody(
        message.response_body.body, end_of_stream=message.response_body.end_of_stream, modes=modes
    ),
    "response_trailers": lambda *_: ResponseTrailers(),
}


def encode(action: Action) -> bytes:
    """Encode one ProcessingResponse."""
    if isinstance(action, Answer):
        return _from_template(action) if _only_names_servers(action) else _encode_answer(action)
    if isinstance(action, Echo):
        return wire.echo(action.slot is Slot.RESPONSE_BODY, action.data, action.end_of_stream)
    response = ext_proc.ProcessingResponse()
    if isinstance(action, Delay):
        response.override_message_timeout.FromMilliseconds(int(1000 * action.seconds))
        return bytes(response.SerializeToString())
    immediate = response.immediate_response
    immediate.status.code = action.status
    immediate.body = action.body
    immediate.details = DETAILS + action.reason
    _set_headers(immediate.headers, action.headers)
    return bytes(response.SerializeToString())


def _only_names_servers(answer: Answer) -> bool:
    """Return whether the answer names servers, or nothing, and says the same about them in each place."""
    if answer.scores or answer.body is not None or answer.cost is not None:
        return False
    named, headers = answer.destination, answer.set_headers
    if headers != (((DESTINATION, named),) if named else ()):
        return False
    return not named or (_SHORTEST_ADDRESS <= len(named) <= _KEPT_BYTES and named.isascii())


def _from_template(answer: Answer) -> bytes:
    """Return the bytes of an answer with other servers, and with these put in their place. Protobuf takes
    five times as long, and a large fleet has so many lists of fallbacks that hardly any comes again.
    """
    named = answer.destination
    around = _template(
        answer.slot, len(named), answer.remove_headers, answer.clear_route_cache, answer.stream_response
    )
    return named.encode().join(around)


@functools.lru_cache(maxsize=4096)
def _template(
    slot: Slot,
    size: int,
    remove_headers: tuple[str, ...],
    clear_route_cache: bool,  # noqa: FBT001 - a key
    stream_response: bool,  # noqa: FBT001 - a key
    /,
) -> tuple[bytes, ...]:
    """Return the bytes around the names of servers. size: the length of these names. 0: the answer names
    none.
    """
    named = "\0" * size  # stands nowhere else in the bytes of an answer
    whole = _encode_answer(
        Answer(
            slot,
            set_headers=((DESTINATION, named),) if named else (),
            remove_headers=remove_headers,
            clear_route_cache=clear_route_cache,
            destination=named,
            stream_response=stream_response,
        )
    )
    return tuple(whole.split(named.encode())) if named else (whole,)


def _encode_answer(answer: Answer) -> bytes:
    response = ext_proc.ProcessingResponse()
    part = getattr(response, answer.slot.value)
    part.SetInParent()
    if answer.set_headers or answer.remove_headers:
        assert answer.slot not in (Slot.REQUEST_TRAILERS, Slot.RESPONSE_TRAILERS)
        mutation = part.response.header_mutation
        _set_headers(mutation, answer.set_headers)
        mutation.remove_headers.extend(answer.remove_headers)
    if answer.body is not None:
        part.response.body_mutation.body = answer.body
    if answer.clear_route_cache:
        part.response.clear_route_cache = True
    if answer.destination:
        metadata = response.dynamic_metadata.fields[_LB_NAMESPACE].struct_value.fields
        metadata[DESTINATION].string_value = answer.destination
        for address, score in answer.scores:
            metadata[_SCORES_KEY].struct_value.fields[address].number_value = score
        if answer.cost is not None:
            metadata[_PROMPT_TOKENS_KEY].number_value = answer.cost.prompt_tokens
            metadata[_MATCHED_TOKENS_KEY].number_value = answer.cost.matched_tokens
            metadata[_PREDICTED_KEY].number_value = answer.cost.predicted_s
    if answer.stream_response:
        response.mode_override.response_header_mode = _SEND
        response.mode_override.response_body_mode = _STREAMED
    return bytes(response.SerializeToString())


def _set_headers(mutation: Any, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("latin-1", "replace")
