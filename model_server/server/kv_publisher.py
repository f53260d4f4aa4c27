"""Sends KV events over ZeroMQ: a PUB socket for current events, and a ROUTER socket for events that a
subscriber missed.

The format on the wire is vLLM's. PUB sends three frames: topic, number (8 bytes, big-endian), batch. A DEALER
that sends an empty frame and a number to the ROUTER gets every kept message from that number on, each after
an empty frame. The last message of the reply has the number -1.

Both sockets bind, whatever the address is; vLLM binds only addresses that contain `*`. A subscriber that does
not keep up loses messages and does not slow the engine. It sees the gap in the numbers, and asks for a
replay.

ZeroMQ is imported when a publisher is opened, so a server without events runs without it. Caller: `serve`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_server.server.kv_events import DEFAULT_BUFFER_BATCHES, KvEventLog, Message

if TYPE_CHECKING:
    from zmq.asyncio import Context, Socket

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_HIGH_WATER_MARK = 100_000
_LINGER_MS = 200
_MESSAGES_A_SLICE = 256
"""The number of messages of a replay that are sent before other tasks get their turn."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSettings:
    endpoint: str
    """A ZeroMQ address to bind: tcp://*:5557, tcp://127.0.0.1:0 for any free port, or ipc://path."""
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_batches: int = DEFAULT_BUFFER_BATCHES

    def __post_init__(self) -> None:
        for address in (self.endpoint, self.replay_endpoint):
            if address is not None and not address.startswith(("tcp://", "ipc://")):
                raise ValueError(
                    f"{address!r} is not an address for KV events; an example of an address is tcp://*:5557"
                )
        fixed = self.endpoint if not self.endpoint.endswith(":0") else None
        if fixed is not None and fixed == self.replay_endpoint:
            raise ValueError("KV events and their replay need two addresses")


@dataclass(kw_only=True)
class KvPublisher:
    """Holds the open sockets. Call `publish` after each step, and run `serve_replays` as a separate task."""

    log: KvEventLog
    settings: KvEventSettings
    pub: Socket
    router: Socket | None
    wall_clock: Callable[[], float]

    @property
    def endpoint(self) -> str:
        """Return the address where subscribers connect, with the number of a port that was chosen as free."""
        return _bound_address(self.pub)

    @property
    def replay_endpoint(self) -> str | None:
        return _bound_address(self.router) if self.router is not None else None

    def source(self) -> dict[str, Any]:
        """Return the settings that a subscriber needs, under vLLM's names."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.settings.buffer_batches,
            "hwm": _HIGH_WATER_MARK,
            "topic": self.settings.topic,
        }

    def publish(self) -> None:
        """Send the notes since the last call, if any, without waiting."""
        message = self.log.take(wall_time_s=self.wall_clock())
        if message is not None:
            # Sending never waits: a PUB socket drops messages that a slow subscriber cannot take.
            self.pub.send_multipart(self._frames(message))

    async def serve_replays(self) -> None:
        """Answer one request after the other, until cancelled."""
        if self.router is None:
            return
        while True:
            frames = await self.router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                _log.warning("ignored a malformed request for a replay: it has %d frames", len(frames))
                continue
            await self._replay(frames[0], int.from_bytes(frames[2], "big"))

    async def _replay(self, client: bytes, sequence: int) -> None:
        assert self.router is not None
        for index, message in enumerate(self.log.since(sequence)):
            await self.router.send_multipart([client, b"", *self._frames(message)])
            if index % _MESSAGES_A_SLICE == _MESSAGES_A_SLICE - 1:
                await asyncio.sleep(0)
        await self.router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def _frames(self, message: Message) -> list[bytes]:
        return [self.settings.topic.encode(), message.sequence.to_bytes(8, "big"), message.payload]


@asynccontextmanager
async def open_publisher(
    log: KvEventLog, settings: KvEventSettings, *, wall_clock: Callable[[], float]
) -> AsyncIterator[KvPublisher]:
    """Return the bound sockets. Raise ValueError if ZeroMQ is not installed, and OSError if an address cannot
    be bound.
    """
    try:
        import zmq  # noqa: PLC0415 - only a server with KV events needs it
        import zmq.asyncio  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ValueError("KV events need ZeroMQ for Python: install pyzmq") from error
    context: Context = zmq.asyncio.Context()
    sockets: list[Socket] = []

    def bound(kind: int, address: str, high_water_mark: int) -> Socket:
        socket = context.socket(kind)
        sockets.append(socket)
        socket.set_hwm(high_water_mark)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise OSError(f"KV events cannot be published at {address}: {error}") from error
        return socket

    try:
        pub = bound(zmq.PUB, settings.endpoint, _HIGH_WATER_MARK)
        # Each client has room for one whole replay. A client that needs more has requested messages and not
        # read them.
        replay = settings.replay_endpoint
        router = bound(zmq.ROUTER, replay, settings.buffer_batches + 1) if replay is not None else None
        yield KvPublisher(log=log, settings=settings, pub=pub, router=router, wall_clock=wall_clock)
    finally:
        for socket in sockets:
            socket.close()
        context.term()


def _bound_address(socket: Socket) -> str:
    import zmq  # noqa: PLC0415 - as in `open_publisher`

    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
