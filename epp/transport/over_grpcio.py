"""The server of the library grpcio as the second transport, for `listen.transport: grpcio`.

Messages reach the handlers as raw bytes, so that unneeded fields are not decoded. Each call is read and
answered in a handler of gRPC's own. This transport costs two to three times the CPU of our own HTTP/2. It
exists for comparisons and as a fallback, and has no TLS. Calls wait inside gRPC, where their age is not
visible, so an overload of the picker is not noticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from epp.base.errors import ConfigError
from epp.config.sections import Listen
from epp.protocol.calls import Handler, Service
from epp.protocol.header_names import TRACEPARENT
from epp.transport.http2.messages import OK, UNKNOWN, Reply
from epp.transport.http2_server import SOCKET_MODE

_log = logging.getLogger(__name__)

_EOF: Final[object] = grpc.aio.EOF
_GrpcioContext = grpc.aio.ServicerContext[bytes, bytes]
_STATUSES: Final = {code.value[0]: code for code in grpc.StatusCode}
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    # A port that another process uses is a mistake to report, so it is not shared.
    ("grpc.so_reuseport", 0),
    # Without these settings, gRPC drops a data plane that sends keepalives every second, with all its
    # streams.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Streams that come at the same moment wait for their turn. By default gRPC refuses some of them at random
    # if there are over 1,000.
    ("grpc.server.max_pending_requests", 2**31 - 1),
    ("grpc.server.max_pending_requests_hard_limit", 2**31 - 1),
)


class GrpcioTransport(grpc.GenericRpcHandler):
    """Serves `services` by path from `start` to `stop`."""

    def __init__(
        self, services: Mapping[str, Service], *, max_message_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._services = services
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: Listen) -> int:
        """Bind and serve. Return the port, or 0 for a unix socket. Raises ConfigError if it cannot listen."""
        address, size = listen.address, ("grpc.max_receive_message_length", self._max_message_bytes)
        self._server = grpc.aio.server(handlers=(self,), options=(size, *_OPTIONS))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"listen.address: cannot listen on {address}: {error}") from error
        if address.startswith("unix:"):
            port = 0
            Path(address.removeprefix("unix:")).chmod(SOCKET_MODE)
        await self._server.start()
        return port

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return how gRPC calls us for this method. None: there is no such method."""
        service = self._services.get(details.method)
        return service and grpc.stream_stream_rpc_method_handler(partial(self._serve, service))

    async def stop(self, grace_s: float) -> None:
        """Close the socket, and cancel the calls still in flight after `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _serve(self, service: Service, _: object, context: _GrpcioContext) -> None:
        """Serve one call: write its answers, while a task of its own reads its messages. This task ends with
        the call. Cancelled inside gRPC's own `read`, it would leak some 100 bytes (grpc/grpc#43360).
        """
        call = _GrpcioCall(context)
        handler = service(call)
        call.reading = asyncio.ensure_future(self._read(call, handler))
        try:
            while (message := await call.answers.get()) is not None:
                await context.write(message)
                if call.answers.empty():
                    call.written.set()
        finally:
            call.is_open = False
            call.written.set()
            handler.gone(now=self._clock(), broken=call.broken)
        if call.status != OK:
            await context.abort(_STATUSES[call.status], call.details)

    async def _read(self, call: _GrpcioCall, handler: Handler) -> None:
        try:
            while (data := await call.context.read()) is not _EOF and call.is_open:
                handler.message(data, now=self._clock())
                del data  # A body must not stay in memory until the next message.
                await call.written.wait()
            if call.is_open:
                handler.half_closed(now=self._clock())
        except grpc.aio.BaseError:
            return  # The call is over, and gRPC ends what still reads.
        except Exception:  # noqa: BLE001 - whatever it is, the caller hears of it
            _log.exception("a call failed")
            call.broken = True
            if call.is_open:
                call.end(UNKNOWN, "the service failed")


class _GrpcioCall:
    """One call as a `calls.Caller`."""

    def __init__(self, context: _GrpcioContext) -> None:
        self.context = context
        self.reading: asyncio.Future[None] | None = None
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        """The messages to be written. None: the call is over."""
        self.written = asyncio.Event()
        """Set while no message has to be written. Until then no further message is read."""
        self.written.set()
        self.is_open = True
        self.broken = False
        """Whether the handler has failed."""
        self.status = OK
        self.details = ""

    @property
    def trace(self) -> str:
        values = [value for key, value in self.context.invocation_metadata() or () if key == TRACEPARENT]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else ""

    def waited_s(self) -> float:
        """Return 0: gRPC does not say how long a message has waited."""
        return 0.0

    def send(self, message: bytes) -> None:
        self.answers.put_nowait(message)
        self.written.clear()

    def reply(self, reply: Reply) -> None:
        """Do nothing: every message goes to the handler, which answers in the same way."""

    def end(self, status: int = OK, details: str = "") -> None:
        self.is_open = False
        self.status, self.details = status, details
        self.answers.put_nowait(None)
