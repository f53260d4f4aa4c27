"""Handles one call of ext_proc, which carries one HTTP request of the data plane. A call takes the bytes of a
message, and sends the bytes of its answers.

Everything is synchronous: a message is handled completely before the next message, so requests never
interleave inside the picker. A transport makes a `Caller` for each call, and hands on what comes.
`live_streams` has the parts that all calls share. `stream` decides the answers, and knows no bytes.

Protobuf's messages become events here, and actions become messages. Only the fields that routing needs are
read. `wire` cuts headers and bodies out of the usual messages, since protobuf would make an object for each
header and copy each body twice. The bytes around the headers repeat, so their meaning is cached.
`by_protobuf` decodes messages of an unusual form. Most answers differ only in the servers that they name,
which are put into the bytes of an earlier answer. Header values travel as latin-1 text inside the picker.

Invariant: however a call ends, its `HttpStream` is closed, so that no booking outlives it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from epp.extproc import by_protobuf, wire
from epp.extproc.asking import bounded_trace
from epp.extproc.bodies import MAX_PIECE_BYTES
from epp.extproc.by_protobuf import Around
from epp.extproc.calls import Caller, Handler
from epp.extproc.header_names import DESTINATION, RESPONSE_NAMES
from epp.extproc.http_events import (
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
from epp.extproc.live_streams import LiveStreams
from epp.extproc.overload import TARGET_S
from epp.extproc.stream import HttpStream
from epp.http2.grpc_messages import INVALID_ARGUMENT, OK
from epp.picker.phases import Phase

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

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


class Conversation(Handler):
    """Handles one call. The transport calls `message` for each message. At the end the transport calls
    `half_closed` if the data plane has ended its side in good order, otherwise `gone`.
    """

    __slots__ = ("_call", "_names", "_picked", "_stream", "_streams")

    def __init__(self, streams: LiveStreams, call: Caller) -> None:
        self._streams = streams
        self._call = call
        self._names: frozenset[str] = frozenset()
        self._picked = False
        self._stream: HttpStream | None = None
        """None: no message has come yet."""

    def message(self, data: bytes, *, now: float) -> None:
        stream = self._stream
        if stream is None:
            stream = self._begin(data, now=now)
            if stream is None:
                return
        elif not self._picked and not self._still_wanted(stream, now=now):
            return
        try:
            self._answer(stream, data, now=now)
        except StreamProtocolError as error:
            self._streams.fault(error.reason)
            self._call.end(INVALID_ARGUMENT, error.reason)
            self.gone(now=now, broken=False)
            return
        if stream.passes:
            self._call.reply(echoes_in)
        if not stream.hold and stream.can_detach:
            self._streams.let_go(stream, now=now)

    def half_closed(self, *, now: float) -> None:
        self._call.end(OK)
        stream, streams = self._stream, self._streams
        if stream is not None:
            streams.live.pop(stream, None)
            stream.half_close(now=now)
            if streams.picker.flow_decides:
                streams.room()

    def gone(self, *, now: float, broken: bool) -> None:
        """Release the stream. Idempotent."""
        stream, streams = self._stream, self._streams
        if stream is not None:
            streams.live.pop(stream, None)
            stream.close(now=now, broken=broken)
            if streams.picker.flow_decides:
                streams.room()

    def _begin(self, data: bytes, *, now: float) -> HttpStream | None:
        """Handle the first message. Return None if the request is answered, or if the data plane no longer
        waits for the answer.
        """
        call, streams = self._call, self._streams
        if not call.is_open:
            return None
        picker, context = streams.picker, streams.context
        if picker.policy is not streams.policy or picker.flow_read is not streams.flow_read:
            streams.renew()
        self._names = streams.names
        overload, waited_s = streams.overload, call.waited_s()
        counts = waited_s > TARGET_S or not overload.quiet
        unread = counts and overload.skips(waited_s=waited_s, now=now)
        if unread and self._answered_unread(data, now=now):
            return None
        stream = self._stream = HttpStream(
            context,
            unread=unread,
            deliver=self._later,
            trace=bounded_trace(call.trace) if context.settings.traced else "",
        )
        streams.live[stream] = call
        return stream

    def _answered_unread(self, data: bytes, *, now: float) -> bool:
        """Answer the first message without a stream, if this is possible. Return whether the call is over."""
        unread, settings = self._streams.unread, self._streams.context.settings
        if not unread.answers(settings):
            return False
        try:
            event = decode(data, names=self._names, response_names=RESPONSE_NAMES, first=True)
        except StreamProtocolError:
            return False
        answer = unread.answer(event, settings=settings, now=now)
        if answer is None:
            return False
        self._call.send(encode(answer))
        self._call.end(OK)
        return True

    def _still_wanted(self, stream: HttpStream, *, now: float) -> bool:
        """Return whether the data plane would use a pick. If the body has waited for too long, it is not read
        any more.
        """
        if not self._call.is_open:
            return False
        overload = self._streams.overload
        if not overload.quiet and overload.gives_up(waited_s=self._call.waited_s(), now=now):
            stream.hurry()
        return True

    def _answer(self, stream: HttpStream, data: bytes, *, now: float) -> None:
        call = self._call
        if stream.passes and (echo := echo_of(data)) is not None:
            call.send(echo)
            return
        event = decode(
            data, names=self._names, response_names=RESPONSE_NAMES, first=stream.phase is Phase.START
        )
        actions = stream.receive(event, now=now)
        if not self._picked:
            if stream.pick is not None:
                self._picked = True
                call.leaves_work()
            elif stream.phase is Phase.WAITING:
                self._streams.room()
        for action in actions:
            call.send(encode(action))

    def _later(self, actions: Sequence[Action]) -> None:
        """Send the answers to a request that waited, because flow control has decided."""
        assert self._stream is not None, "the stream waited"
        self._picked = self._stream.pick is not None
        for action in actions:
            self._call.send(encode(action))


# -- messages ----------------------------------------------------------------------------------------------


def decode(data: bytes, *, names: frozenset[str], response_names: frozenset[str], first: bool) -> Event:
    """Decode one ProcessingRequest. Of the headers, only those in `names` and `response_names` are kept.
    first: this is the first message of the stream, which may state the modes.
    """
    tag = data[0] if data else 0
    event: Event | None = None
    if tag == _REQUEST_HEADERS_TAG:
        event = _cut_request_headers(data, names)
    elif tag == _RESPONSE_HEADERS_TAG:
        event = _cut_response_headers(data, response_names)
    elif not first and tag in (_REQUEST_BODY_TAG, _RESPONSE_BODY_TAG):
        event = _cut_body(data)
    return event or by_protobuf.decode(data, names=names, response_names=response_names)


def echo_of(data: bytes) -> bytes | None:
    """Return the answer that passes on a piece of a response's body unchanged. No object is made for the
    message or the answer. Return None if the message must be decoded.
    """
    found = wire.echo_of(data, MAX_PIECE_BYTES)
    if found is None:
        return None
    answer, rest = found
    return answer if rest == len(data) or _says_nothing_of_bodies(data[rest:]) else None


echoes_in: Final = functools.partial(wire.echoes_in, MAX_PIECE_BYTES)
"""Does the work of `echo_of` for all messages of a DATA frame at once. Takes and returns messages with gRPC's
heads.
"""


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
    """Decode response headers field by field, because the metadata hold the fallback list, and a large fleet
    has very many such lists.
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


def _around(data: bytes) -> Around | None:
    """Return the parts around a main part. None: the bytes are broken, or hold more than the known fields."""
    return _kept_around(data) if len(data) <= _KEPT_BYTES else by_protobuf.around(data)


def _says_nothing_of_bodies(data: bytes) -> bool:
    """Return whether the bytes around a body leave the meaning of the body unchanged."""
    around = _around(data)
    return around is not None and around[2] is None


_kept_around = functools.lru_cache(maxsize=4096)(by_protobuf.around)


@functools.lru_cache(maxsize=16)
def _readable(names: frozenset[str]) -> tuple[str, ...]:
    """Return the names that `wire` can look for: the names in lower-case ASCII. If a message holds a name
    with other letters, protobuf reads the message.
    """
    return tuple(name for name in names if name.isascii() and name == name.lower())


def encode(action: Action) -> bytes:
    """Encode one ProcessingResponse."""
    if isinstance(action, Answer) and _only_names_servers(action):
        return _from_template(action)
    if isinstance(action, Echo):
        return wire.echo(action.slot is Slot.RESPONSE_BODY, action.data, action.end_of_stream)
    return by_protobuf.encode(action)


def _only_names_servers(answer: Answer) -> bool:
    """Return whether the answer only names servers, or nothing, and names the same servers in each place."""
    if answer.scores or answer.body is not None or answer.cost is not None:
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
    named = "\0" * size  # these bytes occur nowhere else in an answer
    whole = by_protobuf.encode(
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
