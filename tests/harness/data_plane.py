"""Plays the data plane's side of ext_proc v3: sends one HTTP request as each body mode requires, and carries
out the picker's answers. A `StreamExchange` is one HTTP request on one gRPC stream. An exchange fails
(AssertionError) if no data plane could use the answer. Values of headers are text with one character for each
byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from google.protobuf import json_format

_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION: Final = "x-gateway-destination-endpoint"
LB: Final = "envoy.lb"
_PATIENCE_S: Final = 120.0

_BODY: Final = processing_mode_pb2.ProcessingMode.BodySendMode
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way in which a data plane sends bodies."""

    request: int
    response: int = _BODY.NONE
    silent: bool = False
    """True if the data plane does not state its modes, as older data planes do not."""
    bare: bool = False
    """True for a data plane like NGINX Gateway Fabric: no pseudo-headers, one body, half-close, and only the
    answer to the headers is read.
    """

    @property
    def duplex(self) -> bool:
        return bool(self.request == _BODY.FULL_DUPLEX_STREAMED)


BUFFERED: Final = Mode(_BODY.BUFFERED)
DUPLEX: Final = Mode(_BODY.FULL_DUPLEX_STREAMED, _BODY.FULL_DUPLEX_STREAMED)
DUPLEX_REQUEST: Final = Mode(_BODY.FULL_DUPLEX_STREAMED)
BARE: Final = Mode(_BODY.FULL_DUPLEX_STREAMED, silent=True, bare=True)

MODES: Final[Mapping[str, Mode]] = {
    "none": Mode(_BODY.NONE),
    "buffered": BUFFERED,
    "buffered_partial": Mode(_BODY.BUFFERED_PARTIAL),
    "streamed": Mode(_BODY.STREAMED, _BODY.STREAMED),
    "full_duplex": DUPLEX,
    "full_duplex_request": DUPLEX_REQUEST,
    "full_duplex_silent": Mode(_BODY.FULL_DUPLEX_STREAMED, _BODY.FULL_DUPLEX_STREAMED, silent=True),
}
"""All ways in which a data plane may send bodies."""


@dataclass(frozen=True, slots=True)
class Immediate:
    """The picker answers the client itself."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Half:
    """One direction of the exchange, after the data plane has applied the picker's answers."""

    headers: list[tuple[str, str]]
    """The headers with lower-case names, after the picker's mutations."""
    pieces: list[bytes] = field(default_factory=list)
    """The body as the picker sent it back. In full duplex this is always the case, in the other modes only if
    the picker replaces the body.
    """
    ends: list[bool] = field(default_factory=list)
    """The end-of-stream flag of each piece."""
    order: list[str] = field(default_factory=list)
    """The kinds of the answers, in the order in which they came."""

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class StreamExchange:
    """One HTTP request. The function `exchange` makes it."""

    def __init__(self, channel: grpc.aio.Channel, *, mode: Mode) -> None:
        self.mode = mode
        self.request = Half([])
        self.response = Half([])
        self.immediate: Immediate | None = None
        self.metadata: dict[str, Any] = {}
        """The picker's dynamic metadata, by namespace."""
        self._sent_modes = mode.silent
        self.call: Any = channel.stream_stream(
            _METHOD,
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )()

    # -- what tests read -------------------------------------------------------------------------------------

    @property
    def destination(self) -> str:
        """Return the destination in the header that would be sent on. Fail unless there is exactly one
        value.
        """
        values = self.request.values(DESTINATION)
        assert len(values) == 1, f"{DESTINATION}: {values}, immediate: {self.immediate}"
        return values[0]

    @property
    def metadata_destination(self) -> str:
        value = self.metadata.get(LB, {}).get(DESTINATION)
        assert isinstance(value, str), f"{DESTINATION} in {self.metadata}, immediate: {self.immediate}"
        return value

    @property
    def destinations(self) -> list[str]:
        return [part.strip() for part in self.destination.split(",")]

    # -- the request -----------------------------------------------------------------------------------------

    async def send(
        self,
        body: bytes | Sequence[bytes] | None = None,
        *,
        method: str = "POST",
        path: str = "/v1/completions",
        headers: Headers = (),
        trailers: bool = False,
    ) -> StreamExchange:
        """Send the whole request by the rules of the mode, and receive every answer to it. `body` is None if
        there is no body, and a sequence if the body comes in pieces.
        """
        pieces = [] if body is None else [body] if isinstance(body, bytes) else list(body)
        pseudo = ((":method", method), (":path", path), (":scheme", "http"), (":authority", "models.test"))
        sent = [*headers] if self.mode.bare else [*pseudo, *headers]
        self.request.headers = [(name.lower(), value) for name, value in sent]
        if self.mode.bare:
            await self._ask_only(sent, pieces)
            return self
        message = _with_headers("request_headers", sent, end=body is None)
        if body is None or self.mode.request == _BODY.NONE:
            await self._ask(message, self.request)
        elif self.mode.duplex:
            await self._send_ahead(message, pieces, trailers=trailers)
        else:
            await self._send_in_turn(message, pieces, trailers=trailers)
        return self

    async def _ask_only(self, headers: Headers, pieces: list[bytes]) -> None:
        """Send everything at once, and then receive until the picker ends the stream."""
        host = (("x-epp-host", "picker"), ("x-epp-port", "9002"))
        head = _with_headers("request_headers", [*headers, *host], end=not pieces, plain_values=True)
        for message in (head, *_bodies("request_body", [b"".join(pieces)] if pieces else [], trailers=False)):
            await self.call.write(message)
        await self.call.done_writing()
        while (answer := await asyncio.wait_for(self.call.read(), _PATIENCE_S)) is not grpc.aio.EOF:
            kind = answer.WhichOneof("response")
            if kind == "immediate_response":
                self.immediate = _immediate(answer.immediate_response)
            elif kind == "request_headers":
                self.request.order.append("headers")
                mutation = answer.request_headers.response.header_mutation
                self.request.headers = _mutated(self.request.headers, mutation)

    async def begin(self) -> None:
        """Send only the headers of a request whose body follows, without waiting for an answer."""
        headers = [(":method", "POST"), (":path", "/v1/completions")]
        await self._write(_with_headers("request_headers", headers, end=False))

    async def _send_in_turn(self, head: Any, pieces: list[bytes], *, trailers: bool) -> None:
        """Send each message after the answer to the previous message."""
        await self._ask(head, self.request)
        if self.mode.request != _BODY.STREAMED:
            pieces = [b"".join(pieces)]
        for message in _bodies("request_body", pieces, trailers=trailers):
            if self.immediate is None:
                await self._ask(message, self.request)

    async def _send_ahead(self, head: Any, pieces: list[bytes], *, trailers: bool) -> None:
        """Send all messages, whatever the picker answers meanwhile."""
        messages = [head, *_bodies("request_body", pieces, trailers=trailers)]
        if trailers:
            messages.append(wire.ProcessingRequest(request_trailers={}))
        writing = asyncio.create_task(self._write_all(messages))
        try:
            half = self.request
            while self.immediate is None and not ("trailers" in half.order if trailers else any(half.ends)):
                await self._read(half)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    # -- the response ----------------------------------------------------------------------------------------

    async def respond(
        self,
        body: bytes | Sequence[bytes] | None = None,
        *,
        headers: Headers = (),
    ) -> None:
        """Send the server's answer."""
        pieces = [] if body is None else [body] if isinstance(body, bytes) else list(body)
        assert self.immediate is None, f"no server was asked, the picker answered: {self.immediate}"
        sent = [(":status", "200"), *headers]
        self.response.headers = [(name.lower(), value) for name, value in sent]
        await self._ask(_with_headers("response_headers", sent, end=body is None), self.response)
        if body is None or self.mode.response == _BODY.NONE:
            return
        duplex = self.mode.response == _BODY.FULL_DUPLEX_STREAMED
        for part in _bodies("response_body", pieces, trailers=False):
            if duplex:
                await self.call.write(part)
            else:
                await self._ask(part, self.response)
        while duplex and not any(self.response.ends):
            await self._read(self.response)

    async def finish(self) -> Any:
        """End the HTTP request: close our side, and return the stream's gRPC status."""
        await self.call.done_writing()
        assert await asyncio.wait_for(self.call.read(), _PATIENCE_S) is grpc.aio.EOF
        return await self.code()

    async def code(self) -> Any:
        """Return the stream's gRPC status, once the picker ends it."""
        return await asyncio.wait_for(self.call.code(), _PATIENCE_S)

    # -- messages --------------------------------------------------------------------------------------------

    async def _write_all(self, messages: Iterable[Any]) -> None:
        for message in messages:
            await self._write(message)

    async def _write(self, message: Any) -> None:
        if not self._sent_modes:
            self._sent_modes = True
            config = message.protocol_config
            config.request_body_mode = self.mode.request
            config.response_body_mode = self.mode.response
        await self.call.write(message)

    async def _ask(self, message: Any, half: Half) -> None:
        await self._write(message)
        await self._read(half)

    async def _read(self, half: Half) -> None:
        answer = await asyncio.wait_for(self.call.read(), _PATIENCE_S)
        assert answer is not grpc.aio.EOF, f"the picker ended the stream: {await self.code()}"
        if answer.HasField("dynamic_metadata"):
            self.metadata.update(json_format.MessageToDict(answer.dynamic_metadata))
        kind = answer.WhichOneof("response")
        if kind == "immediate_response":
            self.immediate = _immediate(answer.immediate_response)
            return
        direction, _, part = (kind or "").partition("_")
        assert half is (self.request if direction == "request" else self.response), f"{kind} out of turn"
        half.order.append(part)
        if part != "trailers":
            self._apply(getattr(answer, kind).response, part, half)

    def _apply(self, common: Any, part: str, half: Half) -> None:
        """Apply an answer to headers or to a body, as a data plane does."""
        half.headers = _mutated(half.headers, common.header_mutation)
        mode = self.mode.request if half is self.request else self.mode.response
        if part != "body":
            return
        if mode == _BODY.FULL_DUPLEX_STREAMED:
            assert common.body_mutation.HasField("streamed_response"), (
                "full duplex: the body has to be sent back"
            )
            half.pieces.append(common.body_mutation.streamed_response.body)
            half.ends.append(common.body_mutation.streamed_response.end_of_stream)
        else:
            assert not common.body_mutation.HasField("streamed_response"), (
                "only full duplex takes a streamed body"
            )
            if common.body_mutation.HasField("body"):
                half.pieces.append(common.body_mutation.body)


def _with_headers(kind: str, headers: Headers, *, end: bool, plain_values: bool = False) -> Any:
    message = wire.ProcessingRequest()
    part = getattr(message, kind)
    part.end_of_stream = end
    for name, value in headers:
        if plain_values:
            part.headers.headers.add(key=name, value=value)
        else:
            part.headers.headers.add(key=name, raw_value=value.encode("latin-1"))
    return message


def _bodies(kind: str, pieces: Sequence[bytes], *, trailers: bool) -> list[Any]:
    """Return the body messages. The last one ends the stream unless trailers follow."""
    last = len(pieces) - 1
    return [
        wire.ProcessingRequest(**{kind: {"body": piece, "end_of_stream": n == last and not trailers}})
        for n, piece in enumerate(pieces)
    ]


def _immediate(message: Any) -> Immediate:
    headers = dict(_mutated([], message.headers))
    return Immediate(status=message.status.code, headers=headers, body=message.body)


def _mutated(headers: list[tuple[str, str]], mutation: Any) -> list[tuple[str, str]]:
    """Return the headers after a mutation: removals, then additions, which overwrite unless `append` is
    set.
    """
    gone = {name.lower() for name in mutation.remove_headers}
    result = [(key, value) for key, value in headers if key not in gone]
    for option in mutation.set_headers:
        name = option.header.key.lower()
        value = (option.header.raw_value or option.header.value.encode()).decode("latin-1")
        if not option.append.value:
            result = [(key, old) for key, old in result if key != name]
        result.append((name, value))
    return result


@asynccontextmanager
async def exchange(channel: grpc.aio.Channel, *, mode: Mode = BUFFERED) -> AsyncIterator[StreamExchange]:
    """Open one HTTP request. If a test leaves the request open, the request is cancelled at the end, as when
    a client goes away.
    """
    running = StreamExchange(channel, mode=mode)
    try:
        yield running
    finally:
        running.call.cancel()
