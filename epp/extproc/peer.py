"""Drives one connection of a data plane: passes bytes from asyncio's transport to `epp.http2`, and events
from there to the handlers of the calls.

A service is a function that makes a handler for each call. Handlers are called synchronously, and all answers
to one read of the socket are sent in one write. In one turn of the loop a peer is served for a few
milliseconds, then the other peers are served. If a peer does not read our answers, we stop reading from it,
and disconnect it in the end. `Lateness` measures how long bytes wait. `http2_server` accepts the connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from math import inf
from typing import Final, Protocol, cast

from epp.extproc.calls import Handler
from epp.extproc.closing import Closing
from epp.http2.beginnings import Beginnings
from epp.http2.call_events import Event, Fault, Gone, HalfClosed, Message, Opened
from epp.http2.connection import Connection
from epp.http2.grpc_messages import OK, UNIMPLEMENTED, UNKNOWN, Reply
from epp.http2.headers import Request
from epp.http2.limits import HeldBytes, Limits

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.002
_MOST_WAITING_BYTES: Final = 2**20
"""The most bytes of calls on one connection that wait to be begun. Beyond this, nothing more is read."""
_TURN_FRAMES: Final = 16
"""Frames that are handled between two readings of the clock."""
_TURN_MESSAGES: Final = 256
"""The most messages that are handled between two readings of the clock. One frame may hold thousands."""
_HIGH_WATER_BYTES: Final = 2**20

_SURELY_BUSY_S: Final = 0.002
"""For bytes that are read within this time after a look, it does not matter whether the loop waited."""
_BETWEEN_LOOKS_S: Final = 0.002
"""Least time between two looks, since each look makes the loop ask the kernel once more. The reported wait is
too long by at most twice this time."""
_BETWEEN_TURNS_S: Final = 0.001
"""Least time from the beginning of one measured turn to the beginning of the next. Reading the CPU time of a
thread is a call to the kernel. If every short turn were measured, there would be two such calls for each
chunk.
"""
_MOST: Final = 0.5
_KEEP: Final = 0.9
"""Weight of the earlier measurements after one more turn."""


class Call:
    """The call of a handler, as a `calls.Caller`."""

    __slots__ = ("_peer", "_stream_id", "trace")

    def __init__(self, peer: Peer, stream_id: int, request: Request) -> None:
        self._peer = peer
        self._stream_id = stream_id
        self.trace = request.traceparent

    @property
    def is_open(self) -> bool:
        return self._peer.connection.is_open(self._stream_id)

    def waited_s(self) -> float:
        return self._peer.server.now() - self._peer.came_after

    def send(self, message: bytes) -> None:
        peer = self._peer
        peer.connection.send(self._stream_id, message)
        if not peer.in_turn:
            peer.flush_soon()

    def reply(self, reply: Reply) -> None:
        peer = self._peer
        if self._stream_id not in peer.beginnings.calls:  # the call's waiting messages come first
            peer.connection.reply(self._stream_id, reply)

    def leaves_work(self) -> None:
        self._peer.work_left = True

    def end(self, status: int = OK, details: str = "") -> None:
        self._peer.end(self._stream_id, status, details)


Service = Callable[[Call], Handler]


class Lateness:
    """Measures how long bytes have waited for this process, on all connections of a server.

    The loop asks the kernel once in each iteration which connections have bytes. So bytes came after the
    previous look, or after the last read if the edge had stopped reading. This is true as long as the process
    was busy. If it was not busy, the loop was waiting, and the bytes came just now. The process was busy if
    the CPU time of the thread since the look, scaled by how slowly its CPU time passes (a quota or other
    processes may take the rest), is most of the time since then.
    """

    def __init__(self, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        """Start the measurement. cpu_clock: CPU time of the event loop's thread."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.looks = 0
        """How often `look` was called so far."""
        self._asked = False
        self._looked_at = self._before = clock()
        self._rested_at, self._cpu_at_rest = self._looked_at, cpu_clock()
        """Time and CPU time of the last look or end of a turn. After that the loop may have waited."""
        self._turn_began, self._cpu_at_turn = -inf, 0.0
        self._measures = False
        """Whether the current turn is measured."""
        self._wall_s = self._cpu_s = 0.0
        """Wall time of the latest turns."""

    def read(self, *, before: float, resumed: int, now: float) -> float:
        """Return the moment after which bytes of a connection came. Call this when the bytes are read.

        before: when the connection was read last;
        resumed: the value of `looks` when the edge began to read the connection again after a pause.
        """
        since_s = now - self._rested_at
        self._measures = since_s > _SURELY_BUSY_S or now - self._turn_began >= _BETWEEN_TURNS_S
        if self._measures:
            cpu = self._cpu_clock()
            self._turn_began, self._cpu_at_turn = now, cpu
            if (
                since_s > _SURELY_BUSY_S
                and (cpu - self._cpu_at_rest) * self._wall_s < _MOST * since_s * self._cpu_s
            ):
                self._before = self._looked_at = now
                return now
        return before if self.looks - resumed <= 1 else max(before, self._before)

    def goes_on(self) -> None:
        """Begin to measure a turn. Call this when the turn begins with bytes that were read before."""
        self._measures = True
        self._turn_began, self._cpu_at_turn = self._clock(), self._cpu_clock()

    def worked(self) -> bool:
        """Measure a turn at its end. Call this when the bytes read so far are handled. Bytes that came
        meanwhile have waited. If the result is True, call `look` in the loop's next iteration, before the
        loop looks for bytes.
        """
        now = self._clock()
        if self._measures or now - self._rested_at >= _BETWEEN_TURNS_S:
            cpu = self._cpu_clock()
            self._rested_at, self._cpu_at_rest = now, cpu
            if self._measures:
                self._wall_s = _KEEP * self._wall_s + now - self._turn_began
                self._cpu_s = _KEEP * self._cpu_s + cpu - self._cpu_at_turn
        if self._asked or now - self._looked_at < _BETWEEN_LOOKS_S:
            return False
        self._asked = True
        return True

    def look(self) -> None:
        """Note the time. Call this just before the loop looks for bytes."""
        self._asked = False
        self.looks += 1
        self._before, self._looked_at = self._looked_at, self._clock()
        self._rested_at, self._cpu_at_rest = self._looked_at, self._cpu_clock()


class Surroundings(Protocol):
    """The parts of the server that a peer uses."""

    services: Mapping[str, Service]
    limits: Limits
    held: HeldBytes
    peers: set[Peer]
    lateness: Lateness

    def now(self) -> float: ...
    def fault(self, reason: str) -> None: ...
    def after_writing(self, *, now: float) -> None: ...


class Peer(asyncio.Protocol):
    """One connection of a data plane."""

    def __init__(self, server: Surroundings) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        """None before and after the connection."""
        self._handlers: dict[int, Handler] = {}
        self.in_turn = False
        """Answers of this turn are written at the end of the turn."""
        self.work_left = False
        """Whether a message of this turn left work, to be done after writing."""
        self._flush_asked = False
        self._again: asyncio.Handle | None = None
        self._closing = Closing()
        self._resumed = -2
        """The number of looks of the server's `Lateness` when we read again after a pause of our own."""
        self._reading = True
        self._read_at = self._read_came_after = 0.0
        self.came_after = 0.0
        """The current bytes arrived after this moment."""
        self.beginnings = Beginnings()
        self.connection = Connection(server.limits, server.held, now=server.now())

    # -- asyncio's calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        session: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if session is not None and session.selected_alpn_protocol() != "h2":
            self.server.fault("no_alpn_h2")
            self.transport.abort()
            return
        self.server.peers.add(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        now = self.server.now()
        lateness = self.server.lateness
        self._read_came_after = lateness.read(before=self._read_at, resumed=self._resumed, now=now)
        self._read_at = now
        self._turn(data, now=now)

    def connection_lost(self, _: Exception | None) -> None:
        self.server.peers.discard(self)
        if self._again is not None:
            self._again.cancel()
        now = self.server.now()
        self.in_turn = True
        self._handle(self.connection.close(now=now), now=now)
        for stream_id in list(self._handlers):
            self._gone(stream_id, now=now)
        self.transport = None

    def pause_writing(self) -> None:
        self._closing.unread_since = self.server.now()
        self._pause()

    def resume_writing(self) -> None:
        self._closing.unread_since = None
        self._go_on()

    # -- for the server and for calls ------------------------------------------------------------------------

    def end(self, stream_id: int, status: int, details: str) -> None:
        self._handlers.pop(stream_id, None)
        if stream_id in self.beginnings.calls:
            self.beginnings.gone(stream_id)
        self.connection.end(stream_id, status, details)
        self.flush_soon()

    def leave(self) -> None:
        """Ask the peer to open no more calls."""
        self.connection.leave(now=self.server.now())
        self.flush()

    def close(self) -> None:
        """Close at once, and end all calls."""
        now = self.server.now()
        self._handle_unasked(self.connection.close(now=now), now=now)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def tick(self, *, now: float) -> None:
        if self._closing.never_reads(now=now):
            self.server.fault("peer_never_reads")
            self.abort()
        elif self._closing.is_over(now=now):
            self.abort()
        else:
            self._handle_unasked(self.connection.tick(now=now), now=now)

    def _handle_unasked(self, events: list[Event], *, now: float) -> None:
        """Handle events that no received bytes caused."""
        self.in_turn = True
        self._handle(events, now=now)
        self.in_turn = False
        self.flush()

    def flush_soon(self) -> None:
        """Write the answer that a handler gave outside of the peer's turn."""
        if not self.in_turn and not self._flush_asked:
            self._flush_asked = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._flush_asked = False
        transport = self.transport
        if transport is None:
            return
        connection = self.connection
        data = connection.data_to_send()
        if data and not transport.is_closing():
            transport.write(data)
        if connection.closing and connection.ends:
            self._closing.begin(transport, now=self.server.now())

    def check_integrity(self) -> None:
        self.connection.check_integrity()
        self.beginnings.check_integrity()

    # -- the turn --------------------------------------------------------------------------------------------

    def _turn(self, data: bytes, *, now: float) -> None:
        """Serve calls that have begun first, then new calls, each for as long as a turn may take."""
        server, connection = self.server, self.connection
        self.in_turn = True
        self.came_after = self._read_came_after
        events = connection.receive(data, now=now, limit=_TURN_FRAMES)
        # If bytes are held, a call waits. A check of `beginnings` would cost a call for every chunk.
        if events or connection.pending or self.beginnings.held_bytes:
            self._serve(events, now=now)
        self.in_turn = False
        self.flush()
        if self.work_left:
            self.work_left = False
            server.after_writing(now=server.now())
        if server.lateness.worked():
            asyncio.get_running_loop().call_soon(server.lateness.look)

    def _serve(self, events: list[Event], *, now: float) -> None:
        server, connection = self.server, self.connection
        started = now
        self._handle(events, now=now)
        while connection.pending and self._closing.unread_since is None:
            now = server.now()
            if now - started > _TURN_S:
                break
            self._handle(connection.receive(b"", now=now, limit=_TURN_FRAMES), now=now)
        if self.beginnings.held_bytes:
            self._begin()
        if connection.pending or self.beginnings.held_bytes:
            self._later()

    def _begin(self) -> None:
        server, beginnings = self.server, self.beginnings
        now = started = server.now()
        while beginnings and now - started <= _TURN_S and self._closing.unread_since is None:
            self.came_after, event = beginnings.take()
            self._hand_over(event, now=now)
            now = server.now()

    def _later(self) -> None:
        """Let the remaining work wait until other peers have had their turn. If the work is frames or many
        bytes, nothing more is read until then.
        """
        if self.connection.pending or self.beginnings.held_bytes > _MOST_WAITING_BYTES:
            self._pause()
        if self._again is None and self._closing.unread_since is None:
            self._again = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._again = None
        if self.transport is None or self.transport.is_closing():
            return
        if self.connection.pending or self.beginnings:
            self.server.lateness.goes_on()
            self._turn(b"", now=self.server.now())
        if (
            not self._reading
            and not self.connection.pending
            and self.beginnings.held_bytes <= _MOST_WAITING_BYTES
            and self._closing.unread_since is None
            and not self.transport.is_closing()
        ):
            self._reading, self._resumed = True, self.server.lateness.looks
            self.transport.resume_reading()

    def _pause(self) -> None:
        self._reading = False
        if self.transport is not None:
            self.transport.pause_reading()

    def _handle(self, events: list[Event], *, now: float) -> None:
        if len(events) > _TURN_MESSAGES:
            self._handle_some(events[:_TURN_MESSAGES], now=now)
            events = events[_TURN_MESSAGES:]
            waiting = [one.stream_id for one in events if isinstance(one, Message | HalfClosed)]
            self.beginnings.calls.update(waiting)
        self._handle_some(events, now=now)

    def _handle_some(self, events: list[Event], *, now: float) -> None:
        beginnings = self.beginnings
        for event in events:
            if type(event) is Message or type(event) is HalfClosed:
                if event.stream_id not in beginnings.calls:
                    self._hand_over(event, now=now)
                elif event is events[-1] and not beginnings.held_bytes and not self.connection.pending:
                    beginnings.calls.discard(event.stream_id)  # no other message of the call waits
                    self._hand_over(event, now=now)
                else:
                    beginnings.add(event, came_after=self.came_after)
            elif type(event) is Opened:
                self._open(event)
            elif type(event) is Gone:
                self._gone(event.stream_id, now=now)
            elif type(event) is Fault:
                self.server.fault(event.reason)

    def _hand_over(self, event: Message | HalfClosed, *, now: float) -> None:
        handler = self._handlers.get(event.stream_id)
        if handler is not None:
            try:
                if type(event) is Message:
                    handler.message(event.data, now=now)
                else:
                    handler.half_closed(now=now)
            except Exception:  # noqa: BLE001 - whatever it is, the others go on
                self._broken(event.stream_id, now=now)

    def _open(self, event: Opened) -> None:
        service = self.server.services.get(event.request.path)
        if service is None:
            self.server.fault("unknown_method")
            self.connection.end(event.stream_id, UNIMPLEMENTED, "unknown method")
            return
        self.beginnings.calls.add(event.stream_id)
        self._handlers[event.stream_id] = service(Call(self, event.stream_id, event.request))

    def _broken(self, stream_id: int, *, now: float) -> None:
        """End only the call in whose handler the bug is. This is called while the exception is handled."""
        _log.exception("a call failed")
        handler = self._handlers.pop(stream_id, None)
        self.end(stream_id, UNKNOWN, "the service failed")
        if handler is not None:
            handler.gone(now=now, broken=True)

    def _gone(self, stream_id: int, *, now: float) -> None:
        if stream_id in self.beginnings.calls:
            self.beginnings.gone(stream_id)
        handler = self._handlers.pop(stream_id, None)
        if handler is not None:
            handler.gone(now=now, broken=False)
