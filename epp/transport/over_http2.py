"""The ext_proc service and the health service on our own HTTP/2 (`transport.http2`): the default transport.

A call is a handler without a task: each message is answered in the same turn of the event loop in which it
was read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from epp.config.listening import Listen
from epp.protocol import access_log
from epp.protocol.calls import Handler
from epp.protocol.conversation import SERVICE, Conversation, LiveStreams
from epp.protocol.health import NAME, Health
from epp.transport.certificates import Certificates
from epp.transport.http2.grpc_messages import INTERNAL, OK, RESOURCE_EXHAUSTED
from epp.transport.http2.limits import Limits
from epp.transport.http2_server import Http2Server, bound, max_peers
from epp.transport.peer import Call, Service

_MOST_QUESTION_BYTES: Final = 1024
"""The most bytes of a question about health. It names a service."""
_MOST_PROBERS: Final = 64
"""The most connections to the port for probes."""


class Http2Transport:
    def __init__(self, streams: LiveStreams, health: Health, *, listen: Listen) -> None:
        self._streams = streams
        self._listen = listen
        self._health = health
        self.server = Http2Server(
            self._services(),
            limits=Limits(max_message_bytes=streams.max_message_bytes),
            max_held_bytes=max(streams.context.settings.room.max_bytes, streams.max_message_bytes),
            max_peers=max_peers(),
            clock=streams.clock,
            on_fault=streams.fault,
            after_writing=streams.picker.tidy,
        )
        self._probed = self._for_probes() if listen.health_address else None

    async def start(self) -> int:
        """Bind and serve. Return the port, or 0 for a unix socket. Raises ConfigError if it cannot listen."""
        tls = self._listen.tls
        certificates = None if tls is None else Certificates(tls)
        sock = bound(self._listen)
        if self._probed is not None:
            self._probed.start(bound(Listen(address=self._listen.health_address)))
        self.server.start(sock, context=None if certificates is None else certificates.current)
        return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(0)

    def check_integrity(self) -> None:
        self.server.check_integrity()

    def _for_probes(self) -> Http2Server:
        return Http2Server(
            self._health_services(),
            limits=Limits(max_message_bytes=_MOST_QUESTION_BYTES),
            max_held_bytes=_MOST_PROBERS * _MOST_QUESTION_BYTES,
            max_peers=_MOST_PROBERS,
            clock=self._streams.clock,
            on_fault=self._streams.fault,
            after_writing=lambda **_: None,
        )

    def _services(self) -> Mapping[str, Service]:
        streams = self._streams
        return {
            f"/{SERVICE}/Process": partial(Conversation, streams),
            f"/{access_log.SERVICE}/{access_log.METHOD}": lambda call: _AccessLogCall(call, streams),
            **self._health_services(),
        }

    def _health_services(self) -> Mapping[str, Service]:
        health = self._health
        return {
            f"/{NAME}/Check": partial(_HealthCall, health=health, watch=False),
            f"/{NAME}/Watch": partial(_HealthCall, health=health, watch=True),
        }


class _AccessLogCall(Handler):
    """Takes in messages. The only answer follows the caller's last message."""

    def __init__(self, call: Call, streams: LiveStreams) -> None:
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


class _HealthCall(Handler):
    """Answers one question. With `watch` it answers again after each change, until the caller leaves."""

    def __init__(self, call: Call, health: Health, *, watch: bool) -> None:
        self._call = call
        self._health = health
        self._watch = watch
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
        if self._watch:
            self._stop_following = self._health.follow(self._send_status)
        self._send_status()
        if not self._watch:
            self._call.end(OK)

    def half_closed(self, *, now: float) -> None:
        if self._service is None:
            self._call.end(INTERNAL, "no message came")

    def gone(self, *, now: float, broken: bool) -> None:
        self._stop_following()

    def _send_status(self) -> None:
        assert self._service is not None
        status = self._health.status(self._service)
        if status != self._status:
            self._status = status
            self._call.send(health_pb2.HealthCheckResponse(status=status).SerializeToString())


def _asked(data: bytes) -> str | None:
    if len(data) > _MOST_QUESTION_BYTES:
        return None
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        return None
