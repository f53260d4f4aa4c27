"""The ext_proc server of a picker: the services and the transport that carries their calls, the timer of the
gate, and the drain.

The transport owns the socket and the wire format: our own HTTP/2 (`http2_server`), or `over_grpcio` if the
configuration asks for it. `conversation` has the calls in flight. The composition root calls this module. All
methods belong to the event loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from epp.config.sections import Listen
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol import access_log
from epp.protocol.calls import Service
from epp.protocol.conversation import SERVICE, Conversation, LiveStreams
from epp.protocol.health import MOST_QUESTION_BYTES, Health
from epp.protocol.settings import StreamSettings
from epp.transport.http2.frames import Limits
from epp.transport.http2_server import Http2Server, max_peers

if TYPE_CHECKING:
    from epp.transport.over_grpcio import GrpcioTransport

_log = logging.getLogger(__name__)

_NOTICE_S: Final = 3.0
"""After this time, a data plane that checks health every second uses another picker."""

_IDLE_S: Final = 1.0
"""If no request has come for this time, the drain does not wait for data planes to notice it."""

_POLL_S: Final = 0.05

_LET_GO_S: Final = 10.0
"""If requests waited in the gate, they have this time until their response headers are answered, even if
`drainSeconds` is shorter."""
_SOON_S: Final = 0.002
"""Events of the same moment are answered together, after this pause."""
_LONGEST_S: Final = 1.0
"""A change of policy or a new server is noticed within this time."""
_AFTER_FAULT_S: Final = 0.1
_MOST_PROBERS: Final = 64
"""The most connections to the port for probes."""


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
        """When the timer rings. inf: there is none. -inf: there will be none."""

    def soon(self) -> None:
        self._set(self._clock() + _SOON_S)

    def stop(self) -> None:
        self._due = -inf
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._due = inf
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
        self._listen = listen
        self.health = Health()
        """What data planes and probes are told."""
        self.streams = LiveStreams(picker, settings=settings, clock=clock, gate=gate)
        """The ext_proc streams in flight. Callers only read them."""
        self._pump = Pump(gate, clock=clock, after=picker.tidy) if gate is not None else None
        if self._pump is not None:
            self.streams.on_room = self._pump.soon
        self._http2 = partial(Http2Server, clock=clock, on_fault=self.streams.fault)
        self.transport = self._transport()
        """The transport that carries the calls: our HTTP/2 or grpcio. Callers only read it."""
        self._probed = self._http2(
            self.health.services(),
            limits=Limits(max_message_bytes=MOST_QUESTION_BYTES),
            max_held_bytes=_MOST_PROBERS * MOST_QUESTION_BYTES,
            max_peers=_MOST_PROBERS,
        )
        """Answers probes at `listen.health_address`, if there is one."""
        self.port = 0
        """The port in use after the start. 0 for a unix socket."""

    async def start(self, *, ready: bool = True) -> None:
        """Bind and serve. Raises ConfigError if the address or a certificate cannot be used."""
        self.health.set_ready(ready=ready)
        # The answer of a pick is written before the event loop goes on.
        self.streams.on_pick = partial(asyncio.get_running_loop().call_soon, self.streams.tidy)
        self.port = await self.transport.start(self._listen)
        if self._listen.health_address:
            await self._probed.start(Listen(address=self._listen.health_address))

    async def drain(self, seconds: float) -> None:
        """Report NOT_SERVING, let streams finish, and go on answering new streams. Returns when no stream is
        left, or after `seconds`, but up to `_LET_GO_S` not before the streams of the requests that waited in
        the gate end. An idle picker returns at once.

        Streams that have answered response headers end with OK now: the data plane completes these requests
        alone.
        """
        self.health.set_ready(ready=False)
        waited, live = self.streams.drain(), self.streams.live
        started = self._clock()
        notice_s = min(seconds, _NOTICE_S if started - self.streams.last_began < _IDLE_S else 0.0)
        passed_s = 0.0
        while (passed_s < seconds and (live or passed_s < notice_s)) or (
            passed_s < _LET_GO_S and not waited.isdisjoint(live)
        ):
            await asyncio.sleep(_POLL_S)
            passed_s = self._clock() - started

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the socket and cancel the calls still in flight after `grace_s`: requests that waited may go
        within this time.
        """
        await self.transport.stop(grace_s if self.streams.live else 0.0)
        await self._probed.stop(0)
        if self._pump is not None:
            self._pump.stop()

    def _transport(self) -> Http2Server | GrpcioTransport:
        """Return the transport that the settings ask for. gRPC's is imported only if it is asked for, because
        it starts its own threads.
        """
        services: Mapping[str, Service] = {
            f"/{SERVICE}/Process": partial(Conversation, self.streams),
            access_log.METHOD: partial(access_log.AccessLog, self.streams.picker, self.streams.fault),
            **self.health.services(),
        }
        most_bytes = self.streams.max_message_bytes
        if self._listen.transport == "grpcio":
            from epp.transport import over_grpcio  # noqa: PLC0415

            return over_grpcio.GrpcioTransport(services, max_message_bytes=most_bytes, clock=self._clock)
        return self._http2(
            services,
            limits=Limits(max_message_bytes=most_bytes),
            max_held_bytes=max(self.streams.context.settings.room.max_bytes, most_bytes),
            max_peers=max_peers(),
        )
