"""Follows the messages of one server over ZeroMQ: a subscription, and a DEALER socket during a replay.

The sockets never block, hold a bounded number of messages, and leave nothing behind when they are closed.
Each replay has a new socket, so that no message of an earlier replay arrives on it. `sequence` decides what
the messages mean. Caller: `service`.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import zmq

from epp.sources.kvevents.sequence import Messages, Step

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""This number marks the end of a replay."""
_REPLAY_TIMEOUT_S: Final = 5.0
"""A replay has failed if no message of it comes for this time."""
_LONGEST_REPLAY_S: Final = 60.0
"""A replay that takes longer has failed, even if messages still come, because published messages wait until
it is over."""
_MESSAGES_A_TURN: Final = 64
"""Most messages read from one server before the others get their turn."""
_RECEIVE_HIGH_WATER_MARK: Final = 256
"""The most messages of a server that wait in its socket. Further messages wait at the server, or are lost and
replayed later."""
MOST_MESSAGE_BYTES: Final = 2**20
"""The largest message: 200,000 tokens that a server stored in one step. If a message is larger, ZeroMQ closes
the connection of its sender and does not reconnect: see `renew`."""
_MOST_SOCKETS: Final = 8_192
"""Four sockets for each followed server, and a few of ZeroMQ's own."""


def new_context() -> Context:
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    return context


@dataclass(frozen=True, slots=True)
class EventSource:
    """The addresses of the events of one server."""

    model: str
    incarnation: str
    events: str
    replay: str
    """Where missed events are replayed. Empty: nowhere."""


class Followed:
    """One server. Raises zmq.ZMQError if no socket is left or an address is wrong."""

    def __init__(self, context: Context, source: EventSource, *, topic: str, gaps: dict[str, int]) -> None:
        self.source = source
        self.messages = Messages(replays=bool(source.replay), gaps=gaps)
        self._context = context
        self._topic = topic
        self.replay: Socket | None = None
        self._asked = 0
        """The number from which the replay was requested."""
        self._give_up_at = self._ends_at = 0.0
        self._connect()

    def _connect(self) -> None:
        self.sub = _open(self._context, zmq.SUB, self.source.events, topic=self._topic)
        self._ended = False
        try:
            self._monitor: Socket = self.sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError:
            self.sub.close(linger=0)
            raise

    def renew(self) -> None:
        """Subscribe again if the connection has ended and everything that came over it was read. Missed
        messages show as a gap.

        ZeroMQ reconnects after most ends of a connection, but not after a message over the limit or one that
        breaks its protocol.
        """
        while _receive(self._monitor) is not None:
            self._ended = True
        if self._ended and not self.sub.poll(0):
            self._disconnect()
            self._connect()

    def _disconnect(self) -> None:
        if not self.sub.closed:
            self.sub.disable_monitor()
            self._monitor.close(linger=0)  # otherwise the context never ends
            self.sub.close(linger=0)

    def close(self) -> None:
        self._disconnect()
        self._close_replay()

    def _close_replay(self) -> None:
        if self.replay is not None:
            self.replay.close(linger=0)
            self.replay = None

    def restarted(self) -> list[Step]:
        """Another part of the picker knows that another process sends now. What waits for a replay is
        dropped: the old process sent it, or the new replay brings it again.
        """
        self._close_replay()
        for _ in range(_RECEIVE_HIGH_WATER_MARK if self.source.replay else 0):
            if _receive(self.sub) is None:
                break
        return self.messages.restarted()

    def read(self, *, now: float) -> list[Step]:
        """Read some messages without waiting, and request missing ones. Returns the steps to do."""
        steps: list[Step] = []
        for _ in range(_MESSAGES_A_TURN):
            found = self._read_live() if self.messages.due is None else self._read_replay(now=now)
            if found is None:
                break
            steps += found
        return steps

    def _read_live(self) -> list[Step] | None:
        """Return the steps of the next message. None: none has come."""
        frames = _receive(self.sub)
        if frames is None:
            return None
        if len(frames) != 3 or len(frames[1]) != 8:
            return [b""]  # it counts as malformed
        if self._topic and frames[0] != self._topic.encode():
            return []  # ZeroMQ compares the beginning of a topic only
        return self.messages.live(int.from_bytes(frames[1], "big"), frames[2])

    def _read_replay(self, *, now: float) -> list[Step] | None:
        """Return the steps of the next replayed message. None: none has come."""
        messages = self.messages
        assert messages.due is not None
        if self.replay is None:
            self._asked, self._give_up_at = messages.due, now + _REPLAY_TIMEOUT_S
            self._ends_at = now + _LONGEST_REPLAY_S
            try:
                self.replay = _open(self._context, zmq.DEALER, self.source.replay)
            except zmq.ZMQError:
                return messages.replay_over()
            self.replay.send_multipart([b"", messages.due.to_bytes(8, "big")], zmq.NOBLOCK)
        frames = _receive(self.replay)
        if frames is None and now < self._give_up_at:
            return None
        self._give_up_at = now + _REPLAY_TIMEOUT_S
        if frames is None or now >= self._ends_at or (len(frames) == 4 and frames[2] == _END_OF_REPLAY):
            steps = messages.replay_over()
        elif len(frames) != 4 or len(frames[2]) != 8:
            return [b""]
        else:
            steps = messages.replayed(int.from_bytes(frames[2], "big"), frames[3])
        if messages.due != self._asked:
            self._close_replay()
        return steps


def _open(context: Context, kind: int, address: str, *, topic: str | None = None) -> Socket:
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


def _receive(socket: Socket) -> list[bytes] | None:
    """Return a message. None: none has come."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
