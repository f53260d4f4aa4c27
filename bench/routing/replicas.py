"""Runs several routers side by side that know nothing of each other. Each gets a share of the requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from model_server.sim.fleet import Router
from model_server.sim.request import SimRequest
from model_server.sim.snapshot import Snapshot


class Replicated:
    def __init__(self, routers: Sequence[Router], *, seed: int) -> None:
        self._routers = routers
        self._rng = random.Random(seed)
        self._owner: dict[int, Router] = {}

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        for router in self._routers:
            router.set_servers(names, restarted=restarted, now=now)

    def route(self, request: SimRequest, *, now: float) -> str | None:
        router = self._rng.choice(self._routers)
        self._owner[request.request_id] = router
        return router.route(request, now=now)

    def first_token(self, request_id: int, *, now: float) -> None:
        self._owner[request_id].first_token(request_id, now=now)

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        self._owner.pop(request_id).ended(request_id, failed=failed, cached_tokens=cached_tokens, now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        self._routers[scraper].scraped(scraper, server, page, now=now)
