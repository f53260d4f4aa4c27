"""Lets simulated pickers share: each picker has the real exchange, and a delay takes the place of Redis."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

from epp.config.sharing import Sharing
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.sources.sharing.exchange import Exchange

_SETTINGS = Sharing()


class Shared:
    """Sends every picker's batches each flush interval. The others receive them `delay_s` later."""

    def __init__(
        self,
        pickers: Sequence[Picker],
        *,
        delay_s: float,
        flush_s: float = _SETTINGS.flush_interval_seconds,
        gates: Sequence[Gate] = (),
    ) -> None:
        """`gates` are the flow control of each picker, if it has one."""
        self._exchanges = [
            Exchange(
                picker,
                me=bytes([n]) * 8,
                outbox_bytes=_SETTINGS.outbox_bytes,
                peer_timeout_s=_SETTINGS.peer_timeout_seconds,
                gate=gates[n] if gates else None,
            )
            for n, picker in enumerate(pickers)
        ]
        self._delay_s = delay_s
        self._flush_s = flush_s
        self._flush_at = 0.0
        self._order = count()
        self._under_way: list[tuple[float, int, Exchange, bytes]] = []
        self.sent_bytes = 0

    @property
    def exchanges(self) -> Sequence[Exchange]:
        return self._exchanges

    def advance(self, now: float) -> None:
        """Deliver and send all batches that are due at `now`."""
        self._deliver(now)
        if now < self._flush_at:
            return
        self._flush_at = now + self._flush_s
        for exchange in self._exchanges:
            exchange.listener.expire(now=now)
            while (batch := exchange.next_batch(now=now)) is not None:
                self.sent_bytes += len(batch)
                heapq.heappush(self._under_way, (now + self._delay_s, next(self._order), exchange, batch))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, _, speaker, batch = heapq.heappop(self._under_way)
            for exchange in self._exchanges:
                if exchange is not speaker:
                    exchange.receive(batch, now=now, age_s=self._delay_s)
