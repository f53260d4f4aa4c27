"""Bounds the number and the lifetime of connections to the admin pages, so that they take little from
serving.

Each connection takes a file descriptor, and a client that never finishes its request would keep it. Here a
new connection replaces the oldest one, so a probe always gets in. Each connection ends after `lifetime_s`.
Called by `admin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class BoundedConnections:
    """A protocol factory around `accept`, which makes the protocol of one connection."""

    def __init__(self, accept: Callable[[], asyncio.Protocol], *, limit: int, lifetime_s: float) -> None:
        self._accept = accept
        self._limit = limit
        self._lifetime_s = lifetime_s
        self._open: dict[_Bounded, None] = {}

    def __call__(self) -> asyncio.Protocol:
        return _Bounded(self, self._accept())

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: _Bounded) -> asyncio.TimerHandle:
        """Make room for a new connection. Returns the timer that ends it."""
        if len(self._open) >= self._limit:
            oldest = next(iter(self._open))
            self.closed(oldest)
            oldest.end()
        self._open[connection] = None
        return asyncio.get_running_loop().call_later(self._lifetime_s, connection.end)

    def closed(self, connection: _Bounded) -> None:
        self._open.pop(connection, None)


class _Bounded(asyncio.Protocol):
    """Passes every event of the transport on to `inner`."""

    def __init__(self, bound: BoundedConnections, inner: asyncio.Protocol) -> None:
        self._bound = bound
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Close without waiting until the other side has read everything."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self._timer = self._bound.opened(self)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._bound.closed(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
