"""Accepts connections for our own HTTP/2, on TCP, unix sockets and TLS, and makes a `Peer` for each.

Owns the listening socket, the connections, and what the connections share: the services, the limits, the
count of held bytes, and the measure of how late we read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final

from epp.extproc.overload import Lateness
from epp.extproc.peer import Peer, Service
from epp.http2.limits import HeldBytes, Limits

_log = logging.getLogger(__name__)

_TICK_S: Final = 0.5
_HANDSHAKE_S: Final = 10.0
_LAST_WORDS_S: Final = 0.25
"""At a stop: the time that peers get to read our last frames before we close their connections."""
_RETRY_S: Final = 0.1


class Http2Server:
    """Serves `services` by path on sockets that are given to `start`, until `stop`."""

    def __init__(
        self,
        services: Mapping[str, Service],
        *,
        limits: Limits,
        max_held_bytes: int,
        max_peers: int,
        clock: Callable[[], float],
        on_fault: Callable[[str], None],
        after_writing: Callable[[], None],
    ) -> None:
        """`on_fault` is called with the reason of each fault of a peer. `after_writing` is called after the
        write of each turn.
        """
        self.services = services
        self.limits = limits
        self.held = HeldBytes(max_held_bytes)
        self.max_peers = max_peers
        self.peers: set[Peer] = set()
        self.now = clock
        self.fault = on_fault
        self.after_writing = after_writing
        self.lateness = Lateness(clock, time.thread_time)
        self._listener: socket.socket | None = None
        self._context: Callable[[], ssl.SSLContext] | None = None
        self._resuming: asyncio.TimerHandle | None = None
        self._arriving: set[asyncio.Task[None]] = set()
        """Connections that are accepted but not served yet. With TLS, these are in their handshake."""
        self._ticking: asyncio.TimerHandle | None = None

    def start(self, sock: socket.socket, *, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Accept connections on a listening socket. `context` is called for the TLS context of each
        connection.
        """
        sock.setblocking(False)
        self._listener, self._context = sock, context
        self._listen(sock)
        self._tick()

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, ask peers to leave, and close the remaining connections after
        `grace_s`.
        """
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()
        if self._resuming is not None:
            self._resuming.cancel()
        await asyncio.sleep(0)  # A task that is cancelled before it begins does not close its socket.
        for task in self._arriving:
            task.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        if grace_s > 0:
            for peer in list(self.peers):
                peer.leave()
            await self._until_gone(grace_s)
        for peer in list(self.peers):
            peer.close()
        await self._until_gone(_LAST_WORDS_S)
        if self._ticking is not None:
            self._ticking.cancel()
        for peer in list(self.peers):
            peer.abort()

    async def _until_gone(self, seconds: float) -> None:
        """Wait until every peer has closed its side, but no longer than the given time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.peers:  # noqa: ASYNC110 - peers say nothing when they are gone
                    await asyncio.sleep(0.01)

    def _listen(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. asyncio's own `sock_accept` loses a connection that arrives while its task
        is cancelled.

        Connections beyond the limit are refused at once, so that file descriptors remain for everything else.
        """
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.fault("accept_failed")
            _log.warning("a connection could not be accepted: %s", error.strerror)
            loop.remove_reader(listener)
            self._resuming = loop.call_later(_RETRY_S, self._listen, listener)
            return
        if len(self.peers) + len(self._arriving) >= self.max_peers:
            self.fault("too_many_connections")
            sock.close()
            return
        sock.setblocking(False)
        task = loop.create_task(self._welcome(sock), name="connection")
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _welcome(self, sock: socket.socket) -> None:
        loop, context = asyncio.get_running_loop(), self._context
        try:
            if context is None:
                await loop.connect_accepted_socket(lambda: Peer(self), sock)
            else:
                await loop.connect_accepted_socket(
                    lambda: Peer(self), sock, ssl=context(), ssl_handshake_timeout=_HANDSHAKE_S
                )
        except OSError as error:  # ssl.SSLError and time-outs are OSErrors
            self.fault("tls_handshake" if context is not None else "accept_failed")
            _log.debug("a connection failed at its beginning: %s", error)
            sock.close()

    def check_integrity(self) -> None:
        for peer in self.peers:
            peer.check_integrity()

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        now = self.now()
        for peer in list(self.peers):
            peer.tick(now=now)
