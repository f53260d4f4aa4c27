"""Decides when to cut a connection to a data plane: if the peer reads none of our bytes, or has not closed
its side after our last frames.
"""

from __future__ import annotations

import asyncio
from typing import Final

_UNREAD_S: Final = 30.0
"""A peer that reads none of our bytes for this time is cut off."""
_CLOSING_S: Final = 1.0
"""The time from our last frames until we cut the connection, if the peer does not close it."""


class Closing:
    def __init__(self) -> None:
        self.unread_since: float | None = None
        """Since when our bytes wait for the peer to read them. None: they do not wait."""
        self._since: float | None = None

    def never_reads(self, *, now: float) -> bool:
        return self.unread_since is not None and now - self.unread_since > _UNREAD_S

    def is_over(self, *, now: float) -> bool:
        """Return whether the peer has had its time to close its side."""
        return self._since is not None and now - self._since > _CLOSING_S

    def begin(self, transport: asyncio.Transport, *, now: float) -> None:
        """End our side. Bytes that the peer has already sent are read and thrown away, because closing a
        socket that holds unread bytes loses our last frames. Idempotent.
        """
        if self._since is not None:
            return
        self._since = now
        if not transport.can_write_eof():
            transport.close()
            return
        try:
            transport.write_eof()
        except OSError:  # The peer is gone.
            transport.abort()
        else:
            transport.resume_reading()
