"""One connection of a data plane: passes bytes from asyncio's transport to `epp.http2`, and events from there
to the handlers of the calls.

A service is a function that makes a handler for each call. Handlers are called synchronously, and all answers
to one read of the socket are sent in one write. In one turn of the loop a peer is served for a few
milliseconds, then the other peers are served. If a peer does not read our answers, we stop reading from it,
and disconnect it in the end. `http2_server` accepts the connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

from epp.extproc.overload import Lateness
from epp.http2.beginnings import Beginnings
from epp.http2.call_events import Event, Fault, Gone, HalfClosed, Message, Opened
from epp.http2.connection import Connection
from epp.http2.headers import Request
from epp.http2.limits import HeldBytes, Limits
from epp.http2.messages import OK, UNIMPLEMENTED, UNKNOWN, Reply

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.002
_MOST_WAITING_BYTES: Final = 2**20
"""The most bytes of calls on one connection that wait to be begun. Beyond this, nothing is read from the
connection.
"""
_TURN_FRAMES: Final = 16
"""Frames that are handled between two readings of the clock."""
_TURN_MESSAGES: Final = 256
"""The most messages that are handled between two readings of the clock. One frame may hold thousands."""
_UNREAD_S: Final = 30.0
"""A peer that reads none of our bytes for this time is cut off."""
_CLOSING_S: Final = 1.0
"""The time from our last frames until we cut the connection, if the peer does not close it."""
_HIGH_WATER_BYTES: Final = 2**20


class Handler:
    """One call, as its service handles it.

    No method is called after `gone`, or after the handler has ended the call.
    """

    __slots__ = ()

    def message(self, data: bytes, *, now: float) -> None:
        """Called when a message of the caller came."""
        raise NotImplementedError

    def half_closed(self, *, now: float) -> None:
        """Called when the caller has sent its last message."""

    def gone(self, *, now: float, broken: bool) -> None:
        """Called when the call ended, but the handler did not end it. broken: the handler itself failed."""


class Call:
    """What a handler may do with its call."""

    __slots__ = ("_peer", "_stream_id", "trace")

    def __init__(self, peer: Peer, stream_id: int, request: Request) -> None:
        self._peer = peer
        self._stream_id = stream_id
        self.trace = request.traceparent
        """The trace context of the call itself, as its headers have it. Data planes that trace send it."""

    @property
    def is_open(self) -> bool:
        """Whether an answer can still reach the caller."""
        return self._peer.connection.is_open(self._stream_id)

    def waited_s(self) -> float:
        """Return how long, at most, the current message has waited for this process."""
        return self._peer.waited_s()

    def send(self, message: bytes) -> None:
        peer = self._peer
        peer.connection.send(self._stream_id, message)
        if not peer.in_turn:
            peer.flush_soon()

    def reply(self, reply: Reply) -> None:
        """Answer the next messages by `reply`, without the handler, until it has no answer to one."""
        self._peer.reply(self._stream_id, reply)

    def end(self, status: int = OK, details: str = "") -> None:
        self._peer.end(self._stream_id, status, details)


Service = Callable[[Call], Handler]


class Surroundings(Protocol):
    """The parts of the server that a peer uses."""

    services: Mapping[str, Service]
    limits: Limits
    held: HeldBytes
    peers: set[Peer]
    lateness: Lateness

    def now(self) -> float: ...
    def fault(self, reason: str) -> None: ...
    def after_writing(self) -> None: ...


class Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: Surroundings) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._handlers: dict[int, Handler] = {}
        self.in_turn = False
        """Answers of this turn are written at the end of the turn."""
        self._flush_asked = False
        self._again: asyncio.Handle | None = None
        self._unread_since: float | None = None
        self._closing_since: float | None = None
        self._resumed = -2
        """The count of `looks` of the server's lateness at the time when we read again after a pause of our
        own.
        """
        self._reading = True
        self._read_at = self._read_came_after = 0.0
        self._came_after = 0.0
        """The current bytes arrived after this moment."""
        self._beginnings = Beginnings()
        self.connection = Connection(server.limits, server.held, now=server.now())

    # -- asyncio's calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        session: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if session is not None and session.selected_alpn_protocol() != "h2":
            self._server.fault("no_alpn_h2")
            self._transport.abort()
            return
        self._server.peers.add(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        now = self._server.now()
        lateness = self._server.lateness
        self._read_came_after = lateness.read(before=self._read_at, resumed=self._resumed, now=now)
        self._read_at = now
        self._turn(data, now=now)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _: Exception | None) -> None:
        self._server.peers.discard(self)
        if self._again is not None:
            self._again.cancel()
        now = self._server.now()
        self.in_turn = True
        self._handle(self.connection.close(now=now), now=now)
        for stream_id in list(self._handlers):
            self._gone(stream_id, now=now)
        self._transport = None

    def pause_writing(self) -> None:
        self._unread_since = self._server.now()
        self._pause()

    def resume_writing(self) -> None:
        self._unread_since = None
        self._go_on()

    # -- for the server and for calls ------------------------------------------------------------------------

    def end(self, stream_id: int, status: int, details: str) -> None:
        self._handlers.pop(stream_id, None)
        if stream_id in self._beginnings.calls:
            self._beginnings.gone(stream_id)
        self.connection.end(stream_id, status, details)
        self.flush_soon()

    def reply(self, stream_id: int, reply: Reply) -> None:
        """The same as `Call.reply`. Messages of the call that wait to be handled must be answered first."""
        if stream_id not in self._beginnings.calls:
            self.connection.reply(stream_id, reply)

    def waited_s(self) -> float:
        """Return how long the current message has waited since it arrived."""
        return self._server.now() - self._came_after

    def leave(self) -> None:
        """Ask the peer to open no more calls."""
        self.connection.leave(now=self._server.now())
        self.flush()

    def close(self) -> None:
        """Close at once, and end all calls."""
        now = self._server.now()
        self._handle_unasked(self.connection.close(now=now), now=now)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def tick(self, *, now: float) -> None:
        if self._unread_since is not None and now - self._unread_since > _UNREAD_S:
            self._server.fault("peer_never_reads")
            self.abort()
        elif self._closing_since is not None and now - self._closing_since > _CLOSING_S:
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
        transport = self._transport
        if transport is None:
            return
        connection = self.connection
        data = connection.data_to_send()
        if data and not transport.is_closing():
            transport.write(data)
        if connection.closing and connection.ends and self._closing_since is None:
            self._closing_since = self._server.now()
            self._end_own_side(transport)

    def _end_own_side(self, transport: asyncio.Transport) -> None:
        """End our side. Bytes that the peer has already sent are read and thrown away, because closing a
        socket that holds unread bytes loses our last frames.
        """
        if not transport.can_write_eof():
            transport.close()
            return
        try:
            transport.write_eof()
        except OSError:  # The peer is gone.
            transport.abort()
        else:
            transport.resume_reading()

    def check_integrity(self) -> None:
        self.connection.check_integrity()
        self._beginnings.check_integrity()

    # -- the turn --------------------------------------------------------------------------------------------

    def _turn(self, data: bytes, *, now: float) -> None:
        """Serve calls that have begun first, then new calls, each for as long as a turn may take."""
        server, connection = self._server, self.connection
        self.in_turn = True
        self._came_after = self._read_came_after
        events = connection.receive(data, now=now, limit=_TURN_FRAMES)
        # If bytes are held, a call waits. A check of `_beginnings` would cost a call for every chunk.
        served = bool(events) or connection.pending or self._beginnings.held_bytes > 0
        if served:
            self._serve(events, now=now)
        self.in_turn = False
        self.flush()
        if served:
            server.after_writing()
        if server.lateness.worked():
            asyncio.get_running_loop().call_soon(server.lateness.look)

    def _serve(self, events: list[Event], *, now: float) -> None:
        server, connection = self._server, self.connection
        started = now
        self._handle(events, now=now)
        while connection.pending and self._unread_since is None:
            now = server.now()
            if now - started > _TURN_S:
                break
            self._handle(connection.receive(b"", now=now, limit=_TURN_FRAMES), now=now)
        if self._beginnings.held_bytes:
            self._begin()
        if connection.pending or self._beginnings.held_bytes:
            self._later()

    def _begin(self) -> None:
        server, beginnings = self._server, self._beginnings
        now = started = server.now()
        while beginnings and now - started <= _TURN_S and self._unread_since is None:
            self._came_after, event = beginnings.take()
            self._hand_over(event, now=now)
            now = server.now()

    def _later(self) -> None:
        """Let the remaining work wait until other peers have had their turn. If it is frames or many bytes,
        nothing more is read until then.
        """
        if self.connection.pending or self._beginnings.held_bytes > _MOST_WAITING_BYTES:
            self._pause()
        if self._again is None and self._unread_since is None:
            self._again = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._again = None
        if self._transport is None or self._transport.is_closing():
            return
        if self.connection.pending or self._beginnings:
            self._server.lateness.goes_on()
            self._turn(b"", now=self._server.now())
        if (
            not self._reading
            and not self.connection.pending
            and self._beginnings.held_bytes <= _MOST_WAITING_BYTES
            and self._unread_since is None
            and not self._transport.is_closing()
        ):
            self._reading, self._resumed = True, self._server.lateness.looks
            self._transport.resume_reading()

    def _pause(self) -> None:
        self._reading = False
        if self._transport is not None:
            self._transport.pause_reading()

    def _handle(self, events: list[Event], *, now: float) -> None:
        if len(events) > _TURN_MESSAGES:
            self._handle_some(events[:_TURN_MESSAGES], now=now)
            events = events[_TURN_MESSAGES:]
            waiting = [one.stream_id for one in events if isinstance(one, Message | HalfClosed)]
            self._beginnings.calls.update(waiting)
        self._handle_some(events, now=now)

    def _handle_some(self, events: list[Event], *, now: float) -> None:
        beginnings = self._beginnings
        for event in events:
            if type(event) is Message or type(event) is HalfClosed:
                if event.stream_id not in beginnings.calls:
                    self._hand_over(event, now=now)
                elif event is events[-1] and not beginnings.held_bytes and not self.connection.pending:
                    beginnings.calls.discard(event.stream_id)  # nothing else to do
                    self._hand_over(event, now=now)
                else:
                    beginnings.add(event, came_after=self._came_after)
            elif type(event) is Opened:
                self._open(event)
            elif type(event) is Gone:
                self._gone(event.stream_id, now=now)
            elif type(event) is Fault:
                self._server.fault(event.reason)

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
        service = self._server.services.get(event.request.path)
        if service is None:
            self._server.fault("unknown_method")
            self.connection.end(event.stream_id, UNIMPLEMENTED, "unknown method")
            return
        self._beginnings.calls.add(event.stream_id)
        self._handlers[event.stream_id] = service(Call(self, event.stream_id, event.request))

    def _broken(self, stream_id: int, *, now: float) -> None:
        """End only the call in whose handler the bug is. This is called while the exception is handled."""
        _log.exception("a call failed")
        handler = self._handlers.pop(stream_id, None)
        self.end(stream_id, UNKNOWN, "the service failed")
        if handler is not None:
            handler.gone(now=now, broken=True)

    def _gone(self, stream_id: int, *, now: float) -> None:
        if stream_id in self._beginnings.calls:
            self._beginnings.gone(stream_id)
        handler = self._handlers.pop(stream_id, None)
        if handler is not None:
            handler.gone(now=now, broken=False)
