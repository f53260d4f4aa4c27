"""The ext_proc service and the health service on our own HTTP/2 (`epp.http2`): the default transport.

A stream is a handler without a task: each message is answered in the same turn of the event loop in which it
was read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from epp.config.listening import Listen
from epp.extproc import access_log
from epp.extproc.certificates import Certificates, ssl_context
from epp.extproc.codec import SERVICE, echoes_in
from epp.extproc.conversation import Conversation, Streams
from epp.extproc.events import StreamProtocolError
from epp.extproc.health import Health
from epp.extproc.http2_server import Http2Server
from epp.extproc.listening import bound, max_peers
from epp.extproc.peer import Call, Handler, Service
from epp.http2.limits import Limits
from epp.http2.messages import INTERNAL, INVALID_ARGUMENT, OK, RESOURCE_EXHAUSTED

_HEALTH: Final = "grpc.health.v1.Health"


class Http2Transport:
    def __init__(self, streams: Streams, health: Health, *, listen: Listen) -> None:
        self._streams = streams
        self._listen = listen
        self._health = health
        self.server = Http2Server(
            self._services(),
            limits=Limits(max_message_bytes=streams.max_message_bytes),
            max_held_bytes=max(streams.settings.room.max_bytes, streams.max_message_bytes),
            max_peers=max_peers(),
            clock=streams.clock,
            on_fault=streams.observer.protocol_error,
            after_writing=streams.tidy,
        )

    async def start(self) -> int:
        """Bind and serve. Returns the port; 0 for a unix socket. Raises ConfigError if it cannot listen."""
        tls = self._listen.tls
        certificates = None if tls is None else Certificates(tls, ssl_context)
        sock = bound(self._listen)
        self.server.start(sock, context=None if certificates is None else certificates.current)
        return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)

    def check_integrity(self) -> None:
        self.server.check_integrity()

    def _services(self) -> Mapping[str, Service]:
        streams, health = self._streams, self._health
        return {
            f"/{SERVICE}/Process": lambda call: _Process(call, streams),
            f"/{access_log.SERVICE}/{access_log.METHOD}": lambda call: _AccessLogCall(call, streams),
            f"/{_HEALTH}/Check": lambda call: _Check(call, health),
            f"/{_HEALTH}/Watch": lambda call: _Watch(call, health),
        }


class _Process(Handler):
    """One ext_proc stream, which carries one HTTP request of the data plane."""

    __slots__ = ("_call", "_conversation", "_streams")

    def __init__(self, call: Call, streams: Streams) -> None:
        self._call = call
        self._streams = streams
        self._conversation: Conversation | None = None
        """None: no message has come yet."""

    def message(self, data: bytes, *, now: float) -> None:
        call, conversation = self._call, self._conversation
        if conversation is None:
            conversation = self._begin(data, now=now)
            if conversation is None:
                return
        elif not conversation.picked:
            if not call.is_open:
                return  # The data plane no longer waits, so nobody would use a pick.
            overload = self._streams.overload
            if overload.is_on(now=now) and overload.gives_up(waited_s=call.waited_s(), now=now):
                conversation.stream.hurry()
        try:
            for answer in conversation.receive(data, now=now):
                call.send(answer)
        except StreamProtocolError as error:
            self._streams.observer.protocol_error(error.reason)
            call.end(INVALID_ARGUMENT, error.reason)
            conversation.close(now=now)
            return
        if conversation.stream.passes:
            call.reply(echoes_in)
        if conversation.may_end:
            conversation.detach(now=now)
            call.end(OK)

    def half_closed(self, *, now: float) -> None:
        self._call.end(OK)
        if self._conversation is not None:
            self._conversation.half_close(now=now)

    def gone(self, *, now: float, broken: bool) -> None:
        if self._conversation is not None:
            self._conversation.close(now=now, broken=broken)

    def _begin(self, data: bytes, *, now: float) -> Conversation | None:
        """Handle the first message. None: the request is answered, or the data plane no longer waits for the
        answer.
        """
        call, streams = self._call, self._streams
        if not call.is_open:
            return None
        unread = streams.overload.skips(waited_s=call.waited_s(), now=now)
        if unread and (answer := streams.answer_unread(data, now=now)) is not None:
            call.send(answer)
            call.end(OK)
            return None
        trace = call.request.traceparent
        self._conversation = streams.open(self._let_go, self._deliver, trace=trace, unread=unread)
        return self._conversation

    def _let_go(self) -> None:
        self._call.end(OK)

    def _deliver(self, answers: Sequence[bytes]) -> None:
        for answer in answers:
            self._call.send(answer)


class _AccessLogCall(Handler):
    """Takes messages without an answer until the caller has sent its last message."""

    def __init__(self, call: Call, streams: Streams) -> None:
        self._call = call
        self._streams = streams
        self._open = streams.access_log.open()

    def message(self, data: bytes, *, now: float) -> None:
        if self._open:
            self._streams.access_log.receive(data, now=now)
        else:
            self._call.end(RESOURCE_EXHAUSTED, "too many access logs")

    def half_closed(self, *, now: float) -> None:
        if self._open:
            self._call.send(b"")
            self._call.end(OK)
            self.gone(now=now, broken=False)
        else:
            self._call.end(RESOURCE_EXHAUSTED, "too many access logs")

    def gone(self, *, now: float, broken: bool) -> None:
        if self._open:
            self._open = False
            self._streams.access_log.close()


class _Check(Handler):
    """Answers one question with one answer."""

    def __init__(self, call: Call, health: Health) -> None:
        self._call = call
        self._health = health

    def message(self, data: bytes, *, now: float) -> None:
        service = _asked(data)
        if service is None:
            self._call.end(INTERNAL, "the message cannot be read")
            return
        self._call.send(_told(self._health.status(service)))
        self._call.end(OK)

    def half_closed(self, *, now: float) -> None:
        self._call.end(INTERNAL, "no message came")

    def gone(self, *, now: float, broken: bool) -> None:
        pass


class _Watch(Handler):
    """Answers one question at once, and again after each change until the caller leaves."""

    def __init__(self, call: Call, health: Health) -> None:
        self._call = call
        self._health = health
        self._service: str | None = None
        self._status = 0
        self._stop_following: Callable[[], None] = lambda: None

    def message(self, data: bytes, *, now: float) -> None:
        service = _asked(data)
        if service is None or self._service is not None:
            self._stop_following()
            self._call.end(INTERNAL, "one message that can be read must come")
            return
        self._service = service
        self._stop_following = self._health.follow(self._tell)
        self._tell()

    def half_closed(self, *, now: float) -> None:
        if self._service is None:
            self._call.end(INTERNAL, "no message came")

    def gone(self, *, now: float, broken: bool) -> None:
        self._stop_following()

    def _tell(self) -> None:
        assert self._service is not None
        status = self._health.status(self._service)
        if status != self._status:
            self._status = status
            self._call.send(_told(status))


def _asked(data: bytes) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        return None


def _told(status: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())
