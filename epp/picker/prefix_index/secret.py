"""The secret from which chunk hashes start. Clients that do not know the secret cannot make texts with equal
hashes.

All pickers that share a table need the same secret. The secret comes from a file, or is derived from the key
that signs the pool's messages, or is made at start. Pickers that made a secret of their own then agree on one
(`epp.sources.sharing.service`). Pure values; `epp.serve.inputs` reads the file.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from msgspec import Struct

KEY_BYTES: Final = 32
_MADE: Final = b"made:"
_GIVEN: Final = b"given:"


class HashSecret(Struct, frozen=True):
    key: bytes = b""
    """At most 64 bytes. Empty: hashes are the same everywhere, for simulations and tests."""
    made_here: bool = False
    """Whether the picker made it at its start, so that it may take another picker's secret instead."""

    def shown(self) -> bytes:
        """Return what the other pickers of the pool may read: the secret itself if it was made here;
        otherwise only a value that shows whether two pickers have the same secret.
        """
        if self.made_here:
            return _MADE + self.key
        return _GIVEN + blake2b(b"which secret", key=self.key, digest_size=16).digest()

    def agreed(self, shown: bytes) -> HashSecret | None:
        """Return the secret to use from now on, from what the pool says: our own or another picker's. None:
        the two secrets do not agree.
        """
        if shown == self.shown():
            return self
        key = shown.removeprefix(_MADE)
        if self.made_here and shown.startswith(_MADE) and len(key) == KEY_BYTES:
            return HashSecret(key, made_here=True)
        return None


def derived(secret: bytes) -> HashSecret:
    """Return the secret that follows from a file of any size."""
    return HashSecret(blake2b(secret, digest_size=KEY_BYTES, person=b"chunk hashes").digest())
