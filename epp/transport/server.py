"""The ext_proc server of a picker: one transport, the streams on it, health, the timer of the gate, and the
drain.

The transport owns the socket and the wire format: our own HTTP/2 (`Http2Transport`), or `over_grpcio` if the
configuration asks for it. `conversation` has the calls in flight. The composition root calls this module. All
methods belong to the event loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Final, Protocol

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from epp.config.listening import Listen
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol import access_log
from epp.protocol.asking import StreamSettings
from epp.protocol.calls import Handler
from epp.protocol.conversation import SERVICE, Conversation, LiveStreams, Overload
from epp.protocol.health import NAME, Health
from epp.protocol.stream import HttpStream
from epp.transport.http2.frames import Limits
from epp.transport.http2.messages import INTERNAL, OK, RESOURCE_EXHAUSTED
from epp.transport.http2_server import Certificates, Http2Server, bound, max_peers
from epp.transport.peer import Call, Service

_log = logging.getLogger(__name__)

_NOTICE_S: Final = 3.0
"""After this time, a data plane that checks health every second uses another picker."""

_IDLE_S: Final = 1.0
"""If no request has come for this time, the drain does not wait for data planes to notice it."""

_POLL_S: Final = 0.05

_LET_GO_S: Final = 10.0
"""Requests that waited in the gate may take this long until their response headers are answered, even if
`drainSeconds` is shorter.
"""
_SOON_S: Final = 0.002
"""Events of the same moment are answered together, after this pause."""
_LONGEST_S: Final = 1.0
"""A change of policy or a new server is noticed within this time."""
_AFTER_FAULT_S: Final = 0.1


class Transport(Protocol):
    """Carries ext_proc streams and the health service."""

    async def start(self) -> int:
        """Bind and serve. Return the port, or 0 for a unix socket. Raises ConfigError if it cannot listen."""

    async def stop(self, grace_s: float) -> None:
        """Close the socket, and cancel the calls still in flight after `grace_s`."""

    def check_integrity(self) -> None: ...


class Pump:
    """The timer of the gate: one timer for all waiting requests, so that no request needs a task of its own.
    It calls the gate when the gate's next decision is due, and soon after each event that may have freed a
    server. There is no timer while no request waits. If the gate fails, the failure is logged, and the timer
    goes on.

    Call `soon` after each event, and `stop` at the end. All calls come from one event loop.
    """

    def __init__(self, gate: Gate, *, clock: Callable[[], float], after: Callable[..., None]) -> None:
        """Make the timer. after: called with the time `now`, each time after the gate was pumped."""
        self._gate = gate
        self._clock = clock
        self._after = after
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf
        self._stopped = False

    def soon(self) -> None:
        self._set(self._clock() + _SOON_S)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        if self._stopped or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer, self._due = None, inf
        now = self._clock()
        try:
            self._gate.pump(now=now)
            due = min(self._gate.due_at, now + _LONGEST_S)
        except Exception:  # noqa: BLE001 - whatever it is, the others go on waiting and are looked at again
            _log.exception("flow control failed; the waiting requests will be considered again")
            due = now + _AFTER_FAULT_S
        self._after(now=now)
        if self._gate.due_at < inf:
            self._set(max(due, now + _SOON_S))


class ExtProcServer:
    """Serves `picker` at `listen` until `stop`."""

    def __init__(
        self,
        picker: Picker,
        *,
        listen: Listen,
        settings: StreamSettings,
        clock: Callable[[], float] = time.monotonic,
        gate: Gate | None = None,
    ) -> None:
        """Prepare the server. gate: where requests may wait. This server runs the gate's timer."""
        self._clock = clock
        self._health = Health()
        self._streams = LiveStreams(picker, settings=settings, clock=clock, gate=gate)
        self._pump = Pump(gate, clock=clock, after=picker.tidy) if gate is not None else None
        if self._pump is not None:
            self._streams.on_room = self._pump.soon
        self.transport = _transport(self._streams, self._health, listen)
        """The transport that carries the calls: our HTTP/2 or grpcio. Callers only read it."""
        self.port = 0
        """The port in use after the start. 0 for a unix socket."""

    @property
    def overload(self) -> Overload:
        """The share of new requests that go unread because the picker has too much work."""
        return self._streams.overload

    @property
    def streams(self) -> int:
        """The number of ext_proc streams in flight."""
        return len(self._streams.live)

    async def start(self, *, ready: bool = True) -> None:
        """Bind and serve. Raises ConfigError if the address or a certificate cannot be used."""
        self._health.set_ready(ready=ready)
        self.port = await self.transport.start()

    async def set_ready(self, *, ready: bool) -> None:
        """Set whether data planes should send requests here."""
        self._health.set_ready(ready=ready)

    async def drain(self, seconds: float) -> None:
        """Report NOT_SERVING, let streams finish, and go on answering new streams. Returns when no stream is
        left, or after `seconds`, but not before the streams of the requests that waited in the gate end. An
        idle picker returns at once.

        Streams that have answered response headers end with OK now: the data plane completes these requests
        alone.
        """
        self._health.set_ready(ready=False)
        waited = self._streams.drain()
        started = self._clock()
        notice_s = min(seconds, _NOTICE_S if started - self._streams.last_began < _IDLE_S else 0.0)
        while True:
            if self._drained(waited, self._clock() - started, seconds=seconds, notice_s=notice_s):
                return
            await asyncio.sleep(_POLL_S)

    def _drained(
        self, waited: frozenset[HttpStream], passed_s: float, *, seconds: float, notice_s: float
    ) -> bool:
        live = self._streams.live
        if passed_s < _LET_GO_S and not waited.isdisjoint(live):
            return False
        return passed_s >= seconds or (not live and passed_s >= notice_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the socket and cancel the calls still in flight after `grace_s`: requests that waited may go
        within this time.
        """
        await self.transport.stop(grace_s if self._streams.live else 0.0)
        if self._pump is not None:
            self._pump.stop()

    def check_integrity(self) -> None:
        self._streams.check_integrity()
        self.transport.check_integrity()


def _transport(streams: LiveStreams, health: Health, listen: Listen) -> Transport:
    """Return the transport that the settings ask for. gRPC's is imported only if it is asked for, because it
    starts its own threads.
    """
    if listen.transport == "grpcio":
        from epp.transport.over_grpcio import GrpcioTransport  # noqa: PLC0415

        return GrpcioTransport(streams, health, listen=listen)
    return Http2Transport(streams, health, listen=listen)


_MOST_QUESTION_BYTES: Final = 1024
"""The most bytes of a question about health. It names a service."""
_MOST_PROBERS: Final = 64
"""The most connections to the port for probes."""


class Http2Transport:
    def __init__(self, streams: LiveStreams, health: Health, *, listen: Listen) -> None:
        self._streams = streams
        self._listen = listen
        self._health = health
        most_bytes = streams.max_message_bytes
        self.server = self._server(
            self._services(),
            message_bytes=most_bytes,
            held_bytes=max(streams.context.settings.room.max_bytes, most_bytes),
            peers=max_peers(),
        )
        self._probed: Http2Server | None = None
        if listen.health_address:
            self._probed = self._server(
                self._health_services(),
                message_bytes=_MOST_QUESTION_BYTES,
                held_bytes=_MOST_PROBERS * _MOST_QUESTION_BYTES,
                peers=_MOST_PROBERS,
            )

    def _server(
        self, services: Mapping[str, Service], *, message_bytes: int, held_bytes: int, peers: int
    ) -> Http2Server:
        return Http2Server(
            services,
            limits=Limits(max_message_bytes=message_bytes),
            max_held_bytes=held_bytes,
            max_peers=peers,
            clock=self._streams.clock,
            on_fault=self._streams.fault,
            after_writing=self._streams.picker.tidy,
        )

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
