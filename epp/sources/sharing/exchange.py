"""Does one picker's side of sharing: makes the batches to send, and applies received batches. Pure.

Callers: `epp.sources.sharing.service`, over Redis or a local socket, and the simulator, with a delay.
"""

from __future__ import annotations

from typing import Final

from epp.picker.picker import Picker
from epp.sources.sharing.batches import channel_of
from epp.sources.sharing.listener import Listener
from epp.sources.sharing.speaker import Speaker

LIFE_SIGN_S: Final = 1.0
"""A picker with nothing to send sends a sign of life this often."""
OUTBOX_BYTES: Final = 16 * 2**20
"""Events that wait while Redis is slow or away. Beyond this the oldest events are dropped and counted."""
PEER_TIMEOUT_S: Final = 5.0
"""A picker that has sent nothing for this long is considered dead. Its requests in flight no longer count."""


class Exchange:
    """Connects one picker with its peers. `me` is a random id, a new one after each start."""

    def __init__(self, picker: Picker, *, me: bytes, outbox_bytes: int = OUTBOX_BYTES) -> None:
        self.picker = picker
        self.speaker = Speaker(speaker=me, limit_bytes=outbox_bytes)
        picker.subscribe(self.speaker.on_event)
        self.listener = Listener(picker, me=me, timeout_s=PEER_TIMEOUT_S)
        self._sign_at = float("-inf")

    def channel(self, pool: str) -> str:
        """Return the channel of its peers. It changes with the policy's chunks and with the hash secret."""
        return channel_of(pool, self.picker.caches.roots)

    def agree(self, shown: bytes) -> bool:
        """Take over the pool's hash secret, if that is possible. If it differs from the current secret, the
        table starts empty. False: the two secrets do not agree.

        shown: what the pool shows of its secret.
        """
        agreed = self.picker.caches.secret.agreed(shown)
        if agreed is not None and agreed != self.picker.caches.secret:
            self.picker.set_secret(agreed)
        return agreed is not None

    def next_batch(self, *, now: float) -> bytes | None:
        """Return the next batch to send. None: there is nothing to send, and no sign of life is due."""
        sign = now - self._sign_at >= LIFE_SIGN_S
        if sign:
            self._sign_at = now
        return self.speaker.batch(now=now) if sign or self.speaker.waiting else None

    def receive(self, data: bytes, *, now: float, age_s: float = 0.0) -> None:
        """Apply a batch from the channel at once. The sender may be any picker. Raises MalformedError."""
        for _ in self.listener.apply(data, now=now, age_s=age_s):
            pass

    def check_integrity(self) -> None:
        self.speaker.check_integrity()
        self.listener.check_integrity()
