"""Does one picker's side of sharing: makes the batches to send, and applies received batches. Pure.

Callers: `epp.sources.sharing.service`, over Redis or a local socket, and the simulator, with a delay.
"""

from __future__ import annotations

from typing import Final

from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.sources.sharing.batches import channel_of
from epp.sources.sharing.listener import Listener
from epp.sources.sharing.speaker import Speaker

LIFE_SIGN_S: Final = 1.0
"""A picker with nothing to send sends a sign of life this often."""


class Exchange:
    """Connects one picker with its peers. `me` is a random id, a new one after each start."""

    def __init__(
        self, picker: Picker, *, me: bytes, outbox_bytes: int, peer_timeout_s: float, gate: Gate | None = None
    ) -> None:
        """`gate` is this picker's flow control. Without a gate, the picker sends no reports about flow
        control and ignores those of others.
        """
        self.picker = picker
        self.speaker = Speaker(speaker=me, limit_bytes=outbox_bytes, gate=gate)
        picker.subscribe(self.speaker.on_event)
        self.listener = Listener(picker, me=me, timeout_s=peer_timeout_s, gate=gate)
        self._hello_sent = 0
        self._sent_at = float("-inf")

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

    def next_batch(self, *, now: float, flags: int = 0, urgent: bool = False) -> bytes | None:
        """Return the next batch to send. None: there is nothing to send, and no sign of life is due."""
        listener = self.listener
        self.speaker.gather_flow()
        due = urgent or self.speaker.waiting or listener.start_fresh or listener.hello != self._hello_sent
        if listener.start_fresh:
            listener.start_fresh = False
            self.speaker.start_fresh()
        if not due and now - self._sent_at < LIFE_SIGN_S:
            return None
        self._sent_at = now
        self._hello_sent = listener.hello
        return self.speaker.batch(now=now, hello=listener.hello, flags=flags)

    def receive(self, data: bytes, *, now: float, age_s: float = 0.0) -> None:
        """Apply a batch from the channel at once. The sender may be any picker. Raises MalformedError."""
        for _ in self.listener.apply(data, now=now, age_s=age_s):
            pass

    def leave(self, *, now: float) -> None:
        self.listener.forget_all(now=now)
        self.speaker.start_fresh()

    def check_integrity(self) -> None:
        self.speaker.check_integrity()
        self.listener.check_integrity()
