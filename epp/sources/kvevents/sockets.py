"""Opens the ZeroMQ sockets of exact mode. They never block, hold a bounded number of messages, and leave
nothing behind when they are closed.

Of the content of messages this module knows only the mark at the end of a replay. Caller: `service`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import zmq

from epp.base.types import EndpointName
from epp.sources.kvevents.sequence import Sequence as Messages

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""This number marks the end of a replay."""
_RECEIVE_HIGH_WATER_MARK: Final = 256
"""The most messages of a server that wait in its socket. Further messages are lost, and are replayed later.
"""
MOST_MESSAGE_BYTES: Final = 2**20
"""The largest message: 200,000 tokens that a server stored in one step. If a message is larger, ZeroMQ closes
the connection of its sender and does not reconnect: see `Subscription`.
"""
_MOST_SOCKETS: Final = 8_192
"""Four sockets for each followed server, and a few of ZeroMQ's own."""


def new_context() -> Context:
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    return context


def open_socket(context: Context, kind: int, address: str, *, topic: str | None = None) -> Socket:
    socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if topic is not None:
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.connect(address)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket


class Subscription:
    """A SUB socket, and whether its connection has ended since it was opened.

    ZeroMQ reconnects after most ends of a connection, but not after a message over the limit or one that
    breaks its protocol. So the reader opens a new subscription after any end.
    """

    def __init__(self, context: Context, address: str, *, topic: str) -> None:
        self.socket = open_socket(context, zmq.SUB, address, topic=topic)
        try:
            self._monitor: Socket = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError:
            self.socket.close(linger=0)
            raise
        self._ended = False

    def read_out(self) -> bool:
        """Return whether the connection has ended, and everything that came over it was read."""
        while receive(self._monitor) is not None:
            self._ended = True
        return self._ended and not self.socket.poll(0)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)  # otherwise the context never ends
        self.socket.close(linger=0)


def receive(socket: Socket) -> list[bytes] | None:
    """Return a message. None: none has come."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


@dataclass(frozen=True, slots=True)
class EventSource:
    """The addresses of the events of one server."""

    model: str
    incarnation: str
    events: str
    replay: str
    """Where missed events are replayed. Empty: nowhere."""


@dataclass(slots=True, eq=False)
class Followed:
    """One server, as the thread sees it."""

    name: EndpointName
    source: EventSource
    messages: Messages
    sub: Subscription
    replay: Socket | None = None
    asked: int = 0
    """The number of the replay request that `replay` is for."""
    give_up_at: float = 0.0

    def close(self, poller: zmq.Poller) -> None:
        if not self.sub.socket.closed:
            self.unsubscribe(poller)
        self.close_replay(poller)

    def unsubscribe(self, poller: zmq.Poller) -> None:
        poller.unregister(self.sub.socket)
        self.sub.close()

    def close_replay(self, poller: zmq.Poller) -> None:
        """Close the socket of a replay that is over or void."""
        if self.replay is not None:
            poller.unregister(self.replay)
            self.replay.close(linger=0)
            self.replay = None
