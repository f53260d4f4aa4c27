"""Decodes and encodes ext_proc's messages of an unusual form by protobuf. `codec` handles the usual messages
itself, and asks here for the rest.

Header values are latin-1 text inside the picker, as in `codec`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError

from epp.base.errors import DETAILS
from epp.protocol.header_names import DESTINATION
from epp.protocol.http_events import (
    Answer,
    BodyMode,
    Delay,
    Event,
    Modes,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Slot,
    StreamProtocolError,
)

_LB_NAMESPACE: Final = "envoy.lb"
_SERVED_KEY: Final = f"{DESTINATION}-served"
_PROMPT_TOKENS_KEY: Final = "x-prefix-gateway-prompt-tokens"
_MATCHED_TOKENS_KEY: Final = "x-prefix-gateway-matched-tokens"
_PREDICTED_KEY: Final = "x-prefix-gateway-predicted-seconds"
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

Around = tuple[tuple[str, ...] | None, str | None, Modes | None, int]
"""The parts of a message besides its main part: the subset hint, the server that served (None: not stated),
the modes, and `ResponseHeaders.lost`.
"""


def decode(data: bytes, *, names: frozenset[str], response_names: frozenset[str]) -> Event:
    """Decode one ProcessingRequest of any form."""
    try:
        message = ext_proc.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise StreamProtocolError("undecodable") from error
    kind = message.WhichOneof("request")
    if kind is None:
        raise StreamProtocolError("empty_message")
    part, (subset, served, modes, lost) = getattr(message, kind), _beside(message)
    match kind:
        case "request_headers":
            return RequestHeaders(_headers(part.headers, names), part.end_of_stream, subset, modes)
        case "response_headers":
            headers = _headers(part.headers, response_names)
            return ResponseHeaders(headers, part.end_of_stream, served or "", modes, lost)
        case "request_body":
            return RequestBody(part.body, part.end_of_stream, modes)
        case "response_body":
            return ResponseBody(part.body, part.end_of_stream, modes)
    return RequestTrailers() if kind == "request_trailers" else ResponseTrailers()


def around(data: bytes) -> Around | None:
    """Return the parts besides the main part. None: the bytes are broken, or hold a main part."""
    try:
        message = ext_proc.ProcessingRequest.FromString(data)
    except DecodeError:
        return None
    return None if message.WhichOneof("request") is not None else _beside(message)


def _beside(message: Any) -> Around:
    return (
        _subset(message.metadata_context) if message.HasField("metadata_context") else None,
        _served(message),
        _modes(message) if message.HasField("protocol_config") else None,
        _lost(message),
    )


def _modes(message: Any) -> Modes:
    config = message.protocol_config
    return Modes(
        request_body=_body_mode(config.request_body_mode),
        response_body=_body_mode(config.response_body_mode),
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


def _lost(message: Any) -> int:
    """Return the number of servers that were tried, if the last one took the request and gave no answer."""
    for attributes in message.attributes.values():
        details = attributes.fields[_RESPONSE_DETAILS].string_value if attributes.fields else ""
        if details.startswith(_ENDED):
            return int(min(_MOST_ATTEMPTS, max(1, attributes.fields[_ATTEMPTS].number_value)))
    return 0


def _served(message: Any) -> str | None:
    """Return the server that served. The attribute is right after retries too, so it goes before the
    metadata. None: the message has neither.
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


def encode(action: Answer | Refuse | Delay) -> bytes:
    """Encode one ProcessingResponse."""
    response = ext_proc.ProcessingResponse()
    if isinstance(action, Answer):
        _fill(response, action)
    elif isinstance(action, Delay):
        response.override_message_timeout.FromMilliseconds(int(1000 * action.seconds))
    else:
        immediate = response.immediate_response
        immediate.status.code = action.status
        immediate.body = action.body
        immediate.details = DETAILS + action.reason
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
        if answer.cost is not None:
            metadata[_PROMPT_TOKENS_KEY].number_value = answer.cost.prompt_tokens
            metadata[_MATCHED_TOKENS_KEY].number_value = answer.cost.matched_tokens
            metadata[_PREDICTED_KEY].number_value = answer.cost.predicted_s
    if answer.stream_response:
        response.mode_override.response_header_mode = _SEND
        response.mode_override.response_body_mode = _STREAMED


def _set_headers(mutation: Any, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("latin-1", "replace")
