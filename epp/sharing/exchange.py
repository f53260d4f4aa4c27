"""One picker's side of sharing: which batch to send next, and what to do with received batches. Pure.

Callers: `epp.sharing.service`, over Redis or a local socket, and the simulator, with a delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from epp.picker import Picker
from epp.sharing.batches import channel_of
from epp.sharing.listener import Listener, WaitsElsewhere
from epp.sharing.speaker import FlowNews, Speaker
from epp.sharing.storing import TableWriter

LIFE_SIGN_S: Final = 1.0
"""A picker that has nothing to say says so this often."""


class FlowPort(FlowNews, WaitsElsewhere, Protocol):
    """Flow control, as pickers share it."""


class Exchange:
    """Between one picker and its peers. `me` is random, another one after each start."""

    def __init__(
        self,
        picker: Picker,
        *,
        me: bytes,
        outbox_bytes: int,
        peer_timeout_s: float,
        flow: FlowPort | None = None,
    ) -> None:
        """flow: this picker's flow control, where it has one."""
        self._picker = picker
        self.speaker = Speaker(speaker=me, limit_bytes=outbox_bytes, flow=flow)
        picker.subscribe(self.speaker.hear)
        self.listener = Listener(picker, me=me, timeout_s=peer_timeout_s, waits=flow)
        self._hello_told = 0
        self._said_at = float("-inf")

    def channel(self, pool: str) -> str:
        """Where its peers are; changes with the policy's chunks and with the hash secret."""
        return channel_of(pool, self._picker.roots)

    def told_secret(self) -> bytes:
        """What peers may read of the picker's hash secret."""
        return self._picker.secret.told()

    def agree(self, told: bytes) -> bool:
        """Take the pool's hash secret, if that can be; the table starts anew if it is another.
        told: what the pool has.
        """
        agreed = self._picker.secret.agreed(told)
        if agreed is not None and agreed != self._picker.secret:
            self._picker.set_secret(agreed)
        return agreed is not None

    @property
    def has_endpoints(self) -> bool:
        """Whether there is anything that a table could be about."""
        return len(self._picker.fleet) > 0

    def next_batch(self, *, now: float, flags: int = 0, urgent: bool = False) -> bytes | None:
        """What to say now; None: nothing, and a sign of life is not due."""
        listener = self.listener
        self.speaker.gather_flow()
        due = urgent or self.speaker.waiting or listener.start_anew or listener.hello != self._hello_told
        if listener.start_anew:
            listener.start_anew = False
            self.speaker.start_anew()
        if not due and now - self._said_at < LIFE_SIGN_S:
            return None
        self._said_at = now
        self._hello_told = listener.hello
        return self.speaker.batch(now=now, hello=listener.hello, flags=flags)

    def hear(self, data: bytes, *, now: float, age_s: float = 0.0) -> None:
        """A batch from the channel, of anybody, at once. MalformedError."""
        for _ in self.listener.hear(data, now=now, age_s=age_s):
            pass

    def hear_in_portions(self, data: bytes, *, now: float, age_s: float) -> Iterator[None]:
        """The same, with a turn for others at each step."""
        return self.listener.hear(data, now=now, age_s=age_s)

    def expire(self, *, now: float) -> None:
        """Forget peers that have gone silent."""
        self.listener.expire(now=now)

    def load(self, data: bytes, *, now: float, age_s: float) -> Iterator[None]:
        """A stored table, in portions. MalformedError."""
        return self.listener.load(data, now=now, age_s=age_s)

    def writer(self) -> TableWriter:
        """To store this picker's table."""
        return TableWriter(self._picker)

    def leave(self, *, now: float) -> None:
        """The channel is another one from now on."""
        self.listener.forget_all(now=now)
        self.speaker.start_anew()

    def check_integrity(self) -> None:
        """Assert the invariants of both sides."""
        self.speaker.check_integrity()
        self.listener.check_integrity()
