"""The ext_proc service on grpc.aio: bytes in, one state machine for each stream, bytes out.

Owns the socket, the streams in flight, the health services and the drain. Messages reach the handler as raw bytes, so that what
is not needed is not decoded. A stream is read and answered in its own handler, without further tasks; between two awaits
the picker is called synchronously, so requests never interleave inside it. Eviction runs after the answer is written.

Invariant: however a handler ends (done, cancelled, failed), its `HttpStream` is closed, so no booking outlives its stream.
Called by the composition root.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from epp.config import Listen
from epp.decision import Observer
from epp.errors import ConfigError
from epp.extproc.certificates import Certificates
from epp.extproc.codec import SERVICE, decode, encode
from epp.extproc.events import StreamProtocolError
from epp.extproc.health import Health
from epp.extproc.reading import RESPONSE_NAMES, request_names
from epp.extproc.response import PickerPort, StreamSettings
from epp.extproc.stream import HttpStream
from epp.policy import Policy
from epp.types import Address

_log = logging.getLogger(__name__)

_MESSAGE_SLACK_BYTES: Final = 2**20
"""Room for what surrounds a body in its message."""

_NOTICE_S: Final = 3.0
"""A data plane that checks health every second has gone elsewhere after this."""

_POLL_S: Final = 0.05

_EOF: Final[object] = grpc.aio.EOF


class ExtProcServer:
    """Serves `picker` at `listen` until `stop`. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        picker: PickerPort,
        observer: Observer,
        *,
        listen: Listen,
        settings: StreamSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._picker = picker
        self._observer = observer
        self._listen = listen
        self._settings = settings
        self._clock = clock
        self._health = Health()
        self._live: set[HttpStream] = set()
        self._reading: dict[HttpStream, asyncio.Task[Any]] = {}
        """Handlers that wait for the data plane, and may be woken to end."""
        self._policy: Policy | None = None
        self._names: frozenset[str] = frozenset()
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """The port in use, once started; 0 for a unix socket."""

    @property
    def streams(self) -> int:
        """ext_proc streams in flight."""
        return len(self._live)

    async def start(self, *, ready: bool = True) -> None:
        """Bind and serve. ConfigError if the address or a certificate cannot be used."""
        server = self._server = grpc.aio.server(options=self._options())
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
        )
        self._health.register(server)
        await self._health.set_live()
        await self._health.set_ready(ready=ready)
        self.port = self._bind(server)
        await server.start()

    async def set_ready(self, *, ready: bool) -> None:
        """Whether data planes should send requests here."""
        await self._health.set_ready(ready=ready)

    async def drain(self, seconds: float) -> None:
        """Say NOT_SERVING, let streams finish, go on answering new ones; back when all is quiet, or after `seconds`.

        Streams that have answered response headers end with OK now: the data plane carries the rest alone.
        """
        await self._health.set_ready(ready=False)
        self._settings = dataclasses.replace(self._settings, hold_streams=False)
        for stream in list(self._live):
            stream.hold = False
            task = self._reading.get(stream)
            if task is not None and stream.can_detach:
                stream.detach(now=self._clock())
                task.cancel()
        started = self._clock()
        while (waited := self._clock() - started) < seconds:
            if not self._live and waited >= min(seconds, _NOTICE_S):
                return
            await asyncio.sleep(_POLL_S)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the socket and cancel what is still in flight after `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    def check_integrity(self) -> None:
        for stream in self._live:
            stream.check_integrity()

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", 2 * self._settings.max_body_bytes + _MESSAGE_SLACK_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # A taken port is a mistake to report, not one to share.
            # A data plane with keepalives of a second would else be dropped with all its streams.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # Streams that come in the same moment wait their turn; by default some of over 1,000 are refused by chance.
            ("grpc.server.max_pending_requests", 2**31 - 1),
            ("grpc.server.max_pending_requests_hard_limit", 2**31 - 1),
        ]

    def _bind(self, server: grpc.aio.Server) -> int:
        address, tls = self._listen.address, self._listen.tls
        _require_free(address)
        try:
            if tls is not None:
                port = server.add_secure_port(address, Certificates(tls).credentials())
            else:
                port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"listen.address: cannot listen on {address}: {error}") from error
        if not address.startswith("unix:"):
            return port
        # Made under the umask, often 0755: a data plane of another user could not connect, and would pass the picker by.
        try:
            Path(address.removeprefix("unix:")).chmod(int(self._listen.socket_mode, 8))
        except OSError as error:
            raise ConfigError(f"listen.socketMode: {address}: {error.strerror}") from error
        return 0

    def _wanted(self) -> frozenset[str]:
        """Names of the request headers to decode; they follow the policy."""
        policy = self._picker.policy
        if policy is not self._policy:
            spec, self._policy = policy.spec, policy
            self._names = request_names(session_header=spec.session_header, debug_header=spec.debug_header)
        return self._names

    async def _process(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        stream = HttpStream(
            self._picker,
            self._observer,
            settings=self._settings,
            new_request_id=_new_request_id,
            timer=time.perf_counter,
        )
        task = asyncio.current_task()
        assert task is not None
        self._live.add(stream)
        broken = False
        try:
            await self._converse(stream, context, task)
        except StreamProtocolError as error:
            self._observer.protocol_error(error.reason)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.reason)
        except asyncio.CancelledError:
            if not stream.closed:
                raise
            task.uncancel()  # The drain's doing: the stream is let go and ends with OK.
        except Exception:
            broken = True
            raise
        finally:
            self._live.discard(stream)
            self._reading.pop(stream, None)
            stream.close(now=self._clock(), broken=broken)

    async def _converse(
        self,
        stream: HttpStream,
        context: grpc.aio.ServicerContext[bytes, bytes],
        task: asyncio.Task[Any],
    ) -> None:
        names = self._wanted()
        kept_house = False
        while stream.hold or not stream.can_detach:
            self._reading[stream] = task
            data = await context.read()
            del self._reading[stream]
            if data is _EOF:
                return
            event = decode(data, names=names, response_names=RESPONSE_NAMES, first=stream.first)
            actions = stream.receive(event, now=self._clock())
            del data, event  # A body must not stay in memory until the next message.
            for action in actions:
                await context.write(encode(action))
            if stream.picked and not kept_house:
                kept_house = True
                self._picker.housekeep(now=self._clock())
        stream.detach(now=self._clock())


def _require_free(address: str) -> None:
    """ConfigError where it cannot be listened on, with the reason: gRPC's own error has none."""
    if address.startswith("unix:"):
        if not (folder := Path(address.removeprefix("unix:")).parent).is_dir():
            raise ConfigError(
                f"listen.address: {address}: there is no folder {folder}; make it, or correct the path"
            )
        return
    if address.endswith(":0"):  # any free one
        return
    wanted = Address.parse(address)
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((wanted.host, wanted.port))
            probe.listen(1)
    except OSError as error:
        hint = "is another picker running?" if error.errno == errno.EADDRINUSE else "choose another"
        raise ConfigError(f"listen.address: cannot listen on {address}: {error.strerror}; {hint}") from error


def _new_request_id() -> str:
    return uuid.uuid4().hex
