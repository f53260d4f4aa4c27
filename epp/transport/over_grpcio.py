"""The ext_proc service and the health service on grpc.aio: the second transport, for `listen.transport:
grpcio`.

Messages reach the handler as raw bytes, so that unneeded fields are not decoded. Each stream is read and
answered in a handler of its own. This transport costs two to three times the CPU of our own HTTP/2. It exists
for comparisons and as a fallback, and has no TLS and no access log service. Calls wait inside gRPC, where
their age is not visible, so an overload of the picker is not noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.base.errors import ConfigError
from epp.config.listening import Listen
from epp.protocol.conversation import SERVICE, Conversation, LiveStreams
from epp.protocol.header_names import TRACEPARENT
from epp.protocol.health import Health
from epp.transport.http2.messages import OK, Reply

_EOF: Final[object] = grpc.aio.EOF


class GrpcioTransport(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    def __init__(self, streams: LiveStreams, health: Health, *, listen: Listen) -> None:
        self._streams = streams
        self._health = health
        self._listen = listen
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Bind and serve. Return the port, or 0 for a unix socket. Raises ConfigError if it cannot listen."""
        server = self._server = grpc.aio.server(options=self._options())
        process: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        port = self._bind(server)
        await server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Close the socket, and cancel the calls still in flight after `grace_s`."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    def check_integrity(self) -> None:
        """Check nothing, because gRPC keeps the state."""

    async def Check(self, request: Any, _: Any) -> Any:  # noqa: N802 - gRPC names the methods
        return health_pb2.HealthCheckResponse(status=self._health.status(request.service))

    async def Watch(self, request: Any, _: Any) -> AsyncIterator[Any]:  # noqa: N802 - as above
        changed, status = asyncio.Event(), 0
        stop_following = self._health.follow(changed.set)
        try:
            while True:
                changed.clear()
                if status != (status := self._health.status(request.service)):
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            stop_following()

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._streams.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # A port that another process uses is a mistake to report, so it is not shared.
            ("grpc.so_reuseport", 0),
            # Without these settings, gRPC drops a data plane that sends keepalives every second, with all its
            # streams.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # Streams that come at the same moment wait for their turn. By default gRPC refuses some of them
            # at random if there are over 1,000.
            ("grpc.server.max_pending_requests", 2**31 - 1),
            ("grpc.server.max_pending_requests_hard_limit", 2**31 - 1),
        ]

    def _bind(self, server: grpc.aio.Server) -> int:
        address = self._listen.address
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"listen.address: cannot listen on {address}: {error}") from error
        if not address.startswith("unix:"):
            return port
        Path(address.removeprefix("unix:")).chmod(int(self._listen.socket_mode, 8))
        return 0

    async def _process(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Serve one call: write its answers, while a task of its own reads its messages. This task ends with
        the call. Cancelled inside gRPC's own `read`, it would leak some 100 bytes (grpc/grpc#43360).
        """
        call = _Call(context)
        conversation = Conversation(self._streams, call)
        reading = asyncio.ensure_future(self._read(call, conversation))
        reading.add_done_callback(call.ended)
        try:
            while (message := await call.answers.get()) is not None:
                await context.write(message)
                if call.answers.empty():
                    call.written.set()
            if call.broken:
                await reading
        finally:
            call.is_open = False
            call.written.set()
            conversation.gone(now=self._streams.clock(), broken=call.broken)
        if call.refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, call.refused)

    async def _read(self, call: _Call, conversation: Conversation) -> None:
        streams = self._streams
        try:
            while (data := await call.context.read()) is not _EOF and call.is_open:
                conversation.message(data, now=streams.clock())
                del data  # A body must not stay in memory until the next message.
                await call.written.wait()
                if call.work_left:
                    call.work_left = False
                    streams.picker.tidy(now=streams.clock())
            if call.is_open:
                conversation.half_closed(now=streams.clock())
        except Exception:
            call.broken = True
            raise


class _Call:
    """One call as a `calls.Caller`."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.context = context
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        """The messages to be written. None: the call is over."""
        self.written = asyncio.Event()
        """Set while no message has to be written. Until then no further message is read."""
        self.written.set()
        self.is_open = True
        self.work_left = False
        self.broken = False
        """Whether the conversation has failed."""
        self.refused = ""
        """Why the call must end with an error."""

    @property
    def trace(self) -> str:
        """The trace context of the call itself."""
        values = [value for key, value in self.context.invocation_metadata() or () if key == TRACEPARENT]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else ""

    def waited_s(self) -> float:
        """Return 0: gRPC does not say how long a message has waited."""
        return 0.0

    def send(self, message: bytes) -> None:
        self.answers.put_nowait(message)
        self.written.clear()

    def reply(self, reply: Reply) -> None:
        """Do nothing: every message goes to the conversation, which answers in the same way."""

    def leaves_work(self) -> None:
        self.work_left = True

    def end(self, status: int = OK, details: str = "") -> None:
        self.is_open = False
        if status != OK:
            self.refused = details
        self.answers.put_nowait(None)

    def ended(self, reading: asyncio.Future[None]) -> None:
        """End the answer after the last message. Reads the exception too, which asyncio would log."""
        if not reading.cancelled():
            reading.exception()
        self.answers.put_nowait(None)
