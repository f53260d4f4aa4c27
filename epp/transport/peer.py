"""Drives one connection of a data plane: passes bytes from asyncio's transport to `http2`, and events
from there to the handlers of the calls.

A service is a function that makes a handler for each call. Handlers are called synchronously, and all answers
to one turn are sent in one write. A turn ends by the clock, which is looked at after each message. `turns`
says when the rest has its turn. The age of a message counts from its read, or from the moment before which
its bytes cannot have come: we stopped reading then, or the busy loop last looked for bytes.
If a peer does not read our answers, we stop reading from it, and disconnect it in the end. `http2_server`
accepts the connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, cast

from epp.protocol.calls import Handler
from epp.transport.accepting import address_of, end_our_side
from epp.transport.http2.connection import Connection
from epp.transport.http2.messages import (
    OK,
    UNIMPLEMENTED,
    UNKNOWN,
    Fault,
    Gone,
    HalfClosed,
    Http2Event,
    Message,
    Opened,
    Reply,
    memory_bytes,
)
from epp.transport.turns import AT_ONCE_S, MOST_AT_ONCE_S, AddressTurns

if TYPE_CHECKING:
    from epp.transport.http2_server import Http2Server

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.004
"""How long the messages of begun calls are handled in a turn. Then those of new calls have as much time."""
_TURN_OF_OTHERS_S: Final = 0.0005
"""The same for a peer without ext_proc calls. Others wait for such a turn with each message of a request."""
_MOST_WAITING_BYTES: Final = 2**20
"""The most bytes of events on one connection that wait for their handlers. Beyond this, nothing is read."""
_STEPS: Final = 16
"""Frames, or steps of as much work, that are read between two readings of the clock."""
_HIGH_WATER_BYTES: Final = 2**20
_UNREAD_S: Final = 30.0
"""A peer that reads none of our bytes for this time is cut off."""
_CLOSING_S: Final = 1.0
"""The time from our last frames until we cut the connection, if the peer does not close it."""


class Call:
    """The call of a handler, as a `calls.Caller`."""

    __slots__ = ("_peer", "begun", "handler", "stream_id", "trace", "waiting")

    def __init__(self, peer: Peer, opened: Opened) -> None:
        self._peer = peer
        self.stream_id = opened.stream_id
        self.trace = opened.request.traceparent
        self.handler: Handler | None = None
        """None: no caller waits for the answer any more."""
        self.waiting = 0
        """How many events of the call wait for the handler."""
        self.begun = False
        """Whether the call has waited for its beginning: events were handled, and none waited after that."""

    @property
    def is_open(self) -> bool:
        return self.stream_id in self._peer.connection.streams

    def waited_s(self) -> float:
        return self._peer.server.now() - self._peer.came_after

    def send(self, message: bytes) -> None:
        peer = self._peer
        peer.connection.send(self.stream_id, message)
        peer.flush_soon()

    def reply(self, reply: Reply) -> None:
        if not self.waiting:  # the call's waiting messages come first
            self._peer.connection.reply(self.stream_id, reply)

    def end(self, status: int = OK, details: str = "") -> None:
        peer = self._peer
        peer.forget(self)
        peer.connection.end(self.stream_id, status, details)
        peer.flush_soon()


_Waiting = tuple[float, Call, Message | HalfClosed | Gone]
"""An event that waits for its handler, with the moment after which it came."""


class Peer(asyncio.Protocol):
    """One connection of a data plane. Waits for its turns as a `turns.Guest`."""

    def __init__(self, server: Http2Server) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        """None before and after the connection."""
        self._calls: dict[int, Call] = {}
        self.source = AddressTurns("")
        self.urgent = False
        self.used_s = 0.0
        self._will_flush = False
        """Whether answers will be written without another word: at the end of the turn, or soon."""
        self._waits = False
        """Whether `turns` will call `go_on`."""
        self._unread_since = inf
        """Since when our bytes wait for the peer to read them. inf: they do not wait."""
        self._closing_since = inf
        """When we ended our side. inf: we have not."""
        self._paused_at = inf
        """Since when we have not read, until the first read after that. inf: we read."""
        self._read_at = 0.0
        self._read_after = 0.0
        """The bytes that were read last arrived after this moment."""
        self.came_after = 0.0
        """The bytes of the current message arrived after this moment."""
        self._of_begun: deque[_Waiting] = deque()
        """The events of calls that have begun, in the order in which they came."""
        self._of_new: deque[_Waiting] = deque()
        """Those of new calls. A begun call has already waited once. Among new calls it would wait again for
        each message."""
        self.waiting_bytes = 0
        self.connection = Connection(server.limits, server.held, now=server.now())

    # -- asyncio's calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.source = self.server.came(self, address_of(transport.get_extra_info("peername")))
        self.source.idle[self] = None
        self.flush()

    def data_received(self, data: bytes) -> None:
        now, turns = self.server.now(), self.server.turns
        if not self.connection.pending:
            self._read_after = min(now, max(turns.busy_since, self._read_at), self._paused_at)
        self._paused_at = inf
        self._read_at = now
        if turns.busy_s > MOST_AT_ONCE_S:
            self._take_in(self.connection.receive(data, now=now, limit=0), now=now)
            self._later()
        else:
            self._turn(data, now=now)

    def connection_lost(self, _: Exception | None) -> None:
        self.server.left(self)
        now, self.transport = self.server.now(), None
        self._unread_since = inf
        self.connection.close(now=now)
        for call in list(self._calls.values()):
            self._gone(call, now=now)

    def pause_writing(self) -> None:
        self._unread_since = self.server.now()
        self._pause()

    def resume_writing(self) -> None:
        self._unread_since = inf
        self._later()

    # -- for the server and for calls ------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask the peer to open no more calls."""
        self.connection.leave(now=self.server.now())
        self.flush()

    def close(self, *, reason: str = "") -> None:
        """Close at once, and end all calls. reason: the fault of the peer, if there is one."""
        now = self.server.now()
        self._take_in(self.connection.close(now=now, reason=reason), now=now)
        self.flush()

    def give_way(self) -> None:
        """Close at once for a newcomer, since this peer has no calls."""
        self.server.fault("idle_connection_closed")
        self.server.left(self)
        self.close()
        self.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def tick(self, *, now: float) -> None:
        if now - self._unread_since > _UNREAD_S:
            self.server.fault("peer_never_reads")
            self.abort()
        elif now - self._closing_since > _CLOSING_S:
            self.abort()
        else:
            self._take_in(self.connection.tick(now=now), now=now)
            self.flush()

    def flush_soon(self) -> None:
        """Write an answer at the end of this turn, or soon if the peer has no turn."""
        if not self._will_flush:
            self._will_flush = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._will_flush = False
        transport = self.transport
        if transport is None:
            return
        connection = self.connection
        data = connection.data_to_send()
        if data and not transport.is_closing():
            transport.write(data)
        if connection.over and self._closing_since == inf:
            self._closing_since = self.server.now()
            end_our_side(transport)

    # -- the turn --------------------------------------------------------------------------------------------

    def _turn(self, data: bytes, *, now: float) -> None:
        """Read and handle what has come, until the time of the turn is over."""
        server, connection = self.server, self.connection
        self._will_flush = True
        events = connection.receive(data, now=now, limit=_STEPS)
        if events:
            self._take_in(events, now=now)
        if connection.pending or self._of_begun or self._of_new:
            self._serve(now=now)
        self.flush()
        turns, ended = server.turns, server.now()
        turns.busy_s += ended - now
        if turns.asked or turns.busy_s > AT_ONCE_S:
            turns.took(self, began=now, now=ended)
        if server.held.unsent > server.held.most:
            server.too_much_unsent()

    def _serve(self, *, now: float) -> None:
        """Serve calls that have begun first, then new calls, each for as long as a turn may take. While
        calls that have begun keep us busy, each turn serves one message of a new call.
        """
        turn_s = _TURN_S if self.urgent else _TURN_OF_OTHERS_S
        until = now + turn_s
        now = self._hand_over(self._of_begun, until=until, now=self.server.now())
        while self.connection.pending and now <= until and self._unread_since == inf:
            self._take_in(self.connection.receive(b"", now=now, limit=_STEPS), now=now)
            now = self._hand_over(self._of_begun, until=until, now=self.server.now())
        more_s = 0.0 if self.connection.pending or self._of_begun else turn_s
        self._hand_over(self._of_new, until=now + more_s, now=now)
        if self.connection.pending or self._of_begun or self._of_new:
            self._later()

    def _take_in(self, events: list[Http2Event], *, now: float) -> None:
        """Open calls, end those that are gone, and let the messages of the others wait. A message that would
        wait alone is handled at once.
        """
        for event in events:
            if type(event) is Opened:
                self._open(event)
                continue
            if type(event) is Fault:
                self.server.fault(event.reason)
                continue
            call = self._calls.get(event.stream_id)
            if call is None:
                continue
            if type(event) is Gone and not (call.begun and call.waiting):
                self._gone(call, now=now)
            elif event is events[-1] and not (self._of_begun or self._of_new or self.connection.pending):
                call.begun = True
                self._handle(call, event, came_after=self._read_after, now=now)
            else:
                call.waiting += 1
                self.waiting_bytes += memory_bytes(event)
                (self._of_begun if call.begun else self._of_new).append((self._read_after, call, event))

    def _hand_over(self, line: deque[_Waiting], *, until: float, now: float) -> float:
        """Hand events to their handlers until that time. Returns the time."""
        while line and now <= until and self._unread_since == inf:
            came_after, call, event = line.popleft()
            self.waiting_bytes -= memory_bytes(event)
            call.waiting -= 1
            call.begun = call.begun or not call.waiting
            self._handle(call, event, came_after=came_after, now=now)
            now = self.server.now()
        return now

    def _handle(
        self, call: Call, event: Message | HalfClosed | Gone, *, came_after: float, now: float
    ) -> None:
        handler = call.handler
        if handler is None:
            return
        self.came_after = came_after
        try:
            if type(event) is Message:
                handler.message(event.data, now=now)
            elif type(event) is Gone:
                self._gone(call, now=now)
            else:
                handler.half_closed(now=now)
        except Exception:  # noqa: BLE001 - whatever it is, the others go on
            _log.exception("a call failed")
            self.connection.end(call.stream_id, UNKNOWN, "the service failed")
            self._gone(call, now=now, broken=True)
            self.flush_soon()

    def _later(self) -> None:
        """Let the remaining work wait for the next turn."""
        if self._must_pause:
            self._pause()
        if not self._waits and self._unread_since == inf:
            self._waits = True
            self.server.turns.wait(self)

    def go_on(self) -> None:
        self._waits = False
        if self.transport is None or self.transport.is_closing():
            return
        self._turn(b"", now=self.server.now())
        if not self._must_pause and self._unread_since == inf:
            self.transport.resume_reading()

    @property
    def _must_pause(self) -> bool:
        """Whether so much work is left, as frames or as many bytes, that nothing more may be read."""
        return self.connection.pending or self.waiting_bytes > _MOST_WAITING_BYTES

    def _pause(self) -> None:
        self._paused_at = min(self._paused_at, self.server.now())
        if self.transport is not None:
            self.transport.pause_reading()

    # -- the calls -------------------------------------------------------------------------------------------

    def _open(self, event: Opened) -> None:
        service = self.server.services.get(event.request.path)
        if service is None:
            self.server.fault("unknown_method")
            self.connection.end(event.stream_id, UNIMPLEMENTED, "unknown method")
            return
        if not self._calls:
            self.source.idle.pop(self, None)
        call = self._calls[event.stream_id] = Call(self, event)
        call.handler = service(call)
        self.urgent = self.urgent or call.handler.urgent

    def _gone(self, call: Call, *, now: float, broken: bool = False) -> None:
        handler = self.forget(call)
        if handler is not None:
            handler.gone(now=now, broken=broken)

    def forget(self, call: Call) -> Handler | None:
        """Forget the call, since no caller waits for its answer any more."""
        handler, call.handler = call.handler, None
        self._calls.pop(call.stream_id, None)
        if handler is not None and not self._calls and self in self.source.guests:
            self.source.idle[self] = None
        return handler
