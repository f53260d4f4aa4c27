"""Runs several real pickers as the router of a simulated fleet, for the benches of routing.

Each picker gets a random share of the requests, and scrapes for itself. The pickers report their picks to
each other with a delay, or share nothing except the servers.
"""

import heapq
import random
from collections.abc import Sequence
from itertools import count

from epp.config.policy import Policy
from epp.config.sharing import Sharing
from epp.picker.picker import Picker
from epp.sources.sharing.exchange import Exchange
from epp.tools.replay import simulate
from model_server.sim.engine import Snapshot
from model_server.sim.request import SimRequest


class PickerRouter(simulate.PickerRouter):
    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        replicas: int = 1,
        share_delay_s: float | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        pickers = [Picker(policy, rng=random.Random(seed * 1000 + n)) for n in range(replicas)]
        super().__init__(pickers, adapters=adapters)
        self._rng = random.Random(seed)
        self.shared: Shared | None = None
        if share_delay_s is not None:
            self.shared = Shared(self.pickers, delay_s=share_delay_s)

    def advance(self, now: float) -> None:
        if self.shared is not None:
            self.shared.advance(now)

    def route(self, request: SimRequest, *, now: float) -> str | None:
        self.advance(now)
        return self._send(request, self._pick_request(request), self._picker_for(request), now=now)

    def _picker_for(self, _request: SimRequest) -> Picker:
        """Return a random picker, which gets the request."""
        return self.pickers[self._rng.randrange(len(self.pickers))]

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        self.advance(now)
        super().ended(request_id, failed=failed, cached_tokens=cached_tokens, now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        self.advance(now)
        super().scraped(scraper, server, page, now=now)


_FLUSH_S = Sharing().flush_interval_seconds


class Shared:
    """Sends every picker's batches each flush interval. The others receive them `delay_s` later."""

    def __init__(self, pickers: Sequence[Picker], *, delay_s: float) -> None:
        self._exchanges = [Exchange(picker, me=bytes([n]) * 8) for n, picker in enumerate(pickers)]
        self._delay_s = delay_s
        self._flush_at = 0.0
        self._order = count()
        self._under_way: list[tuple[float, int, Exchange, bytes]] = []

    def advance(self, now: float) -> None:
        """Deliver and send all batches that are due at `now`."""
        self._deliver(now)
        if now < self._flush_at:
            return
        self._flush_at = now + _FLUSH_S
        for exchange in self._exchanges:
            exchange.listener.expire(now=now)
            while (batch := exchange.next_batch(now=now)) is not None:
                heapq.heappush(self._under_way, (now + self._delay_s, next(self._order), exchange, batch))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, _, speaker, batch = heapq.heappop(self._under_way)
            for exchange in self._exchanges:
                if exchange is not speaker:
                    list(exchange.listener.apply(batch, now=now, age_s=self._delay_s))
