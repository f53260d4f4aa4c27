"""Bounds the size of one answer of Redis before it is read. Otherwise anyone who can write to Redis could
fill this process's memory with one value of 512 MB.

Redis states the size of each value before the value. A reply that exceeds the bound ends its connection. The
parser is redis-py's own for RESP2; `redis_link` gives it to its clients.
"""

from __future__ import annotations

from typing import Any, Final

from redis import exceptions
from redis._parsers import _AsyncRESP2Parser

MOST_PIECE_BYTES: Final = 2**20
"""The largest value that is requested: the stored table is read in pieces of this size."""
_MOST_LIST_BYTES: Final = 64 * 2**20
"""Largest reply that is a list: as many batches as are read at once."""


class BoundedParser(_AsyncRESP2Parser):
    """Raises InvalidResponse, which ends the connection, if a reply is too large."""

    __slots__ = ("_begun", "_left")

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: FBT001, FBT002 - redis-py calls it
        self._left, self._begun = MOST_PIECE_BYTES, False
        return await super().read_response(disable_decoding=disable_decoding)

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        if not self._begun and line.startswith(b"*"):
            self._left = _MOST_LIST_BYTES
        self._begun = True
        return line

    async def _read(self, length: int) -> bytes:
        self._left -= length
        if self._left < 0:
            raise exceptions.InvalidResponse(f"a value of {length} bytes in a reply is too large to be read")
        value: bytes = await super()._read(length)
        return value
