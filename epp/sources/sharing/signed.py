"""Signs the messages of a link with the key of the pool, so that others who can write to the same Redis
cannot influence the pickers.

The signature covers the channel, the kind of message and its bytes. It does not cover the time. So someone
who can write to Redis can repeat an earlier message of a picker, but cannot make a new one. Called by `start`
where the pool has a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import Final

from epp.sources.sharing.link import Link, Received

_log = logging.getLogger(__name__)

SIGNATURE_BYTES: Final = 16
_REFUSED: Final = b""
"""`read` returns this for a refused message. It is not a batch, so it is counted as malformed."""


class SignedLink:
    """Like `link`, but refuses messages that the key did not sign."""

    def __init__(self, link: Link, *, key: bytes) -> None:
        self._link = link
        self._key = hashlib.sha256(key).digest()
        self._channel = ""

    async def agree(self, pool: str, mine: bytes) -> bytes:
        return await self._link.agree(pool, mine)

    async def join(self, channel: str) -> None:
        self._channel = channel
        await self._link.join(channel)

    async def send(self, batch: bytes) -> None:
        await self._link.send(self._sign(b"batch", batch) + batch)

    async def read(self) -> list[Received]:
        return [
            Received(self._opened(b"batch", r.data) or _REFUSED, r.age_s) for r in await self._link.read()
        ]

    async def stored(self) -> Received | None:
        found = await self._link.stored()
        if found is None:
            return None
        # A table has many megabytes, so its signature is made and checked in a thread.
        table = await asyncio.to_thread(self._opened, b"table", found.data)
        return None if table is None else Received(table, found.age_s)

    async def store(self, table: bytes) -> None:
        await self._link.store(await asyncio.to_thread(self._sign, b"table", table) + table)

    async def take_turn(self, name: str, *, period_s: float) -> bool:
        return await self._link.take_turn(name, period_s=period_s)

    async def close(self) -> None:
        await self._link.close()

    def _sign(self, kind: bytes, data: bytes | memoryview) -> bytes:
        made = hashlib.blake2b(key=self._key, digest_size=SIGNATURE_BYTES, person=kind)
        made.update(f"{self._channel}\0".encode())
        made.update(data)
        return made.digest()

    def _opened(self, kind: bytes, signed: bytes | memoryview) -> memoryview | None:
        """Return the message without its signature. None: the signature is wrong."""
        signature, data = memoryview(signed)[:SIGNATURE_BYTES], memoryview(signed)[SIGNATURE_BYTES:]
        if hmac.compare_digest(signature, self._sign(kind, data)):
            return data
        _log.warning(
            "refused a %s of %d bytes: the pool's key did not sign it; do all pickers have the same sharing.redis.signingKeyFile?",
            kind.decode(),
            len(data),
        )
        return None
