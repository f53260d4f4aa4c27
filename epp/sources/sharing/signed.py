"""Signs messages with the key of the pool, so that others who can write to the same Redis cannot influence
the pickers.

The signature covers the channel, the kind of message and its bytes. It does not cover the time. So someone
who can write to Redis can repeat an earlier message of a picker, but cannot make a new one. Called by
`redis_link` where the pool has a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Final, Literal

_log = logging.getLogger(__name__)

SIGNATURE_BYTES: Final = 16
Kind = Literal["batch", "table"]


class Seal:
    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(key).digest()

    def sign(self, kind: Kind, data: bytes | memoryview, *, channel: str) -> bytes:
        """Return the signature."""
        made = hashlib.blake2b(key=self._key, digest_size=SIGNATURE_BYTES, person=kind.encode())
        made.update(f"{channel}\0".encode())
        made.update(data)
        return made.digest()

    def opened(self, kind: Kind, signed: bytes | memoryview, *, channel: str) -> memoryview | None:
        """Return the message without its signature. None: the signature is wrong."""
        signature, data = memoryview(signed)[:SIGNATURE_BYTES], memoryview(signed)[SIGNATURE_BYTES:]
        if hmac.compare_digest(signature, self.sign(kind, data, channel=channel)):
            return data
        _log.warning(
            "refused a %s of %d bytes: the pool's key did not sign it; do all pickers have the same sharing.redis.signingKeyFile?",
            kind,
            len(data),
        )
        return None
