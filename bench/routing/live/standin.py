"""Runs a rule of the benchmark in place of a picker: Envoy asks the rule over ext_proc, and the rule gets the
same events as in the simulator. The rule runs in the generator's process, so it gets first tokens and ends
without delay. It reads the servers' pages once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from bench.routing.live.generator import REQUEST_ID, RunClock
from epp.base.types import EndpointMetrics
from epp.serve.envoy import eds
from epp.sources.scraping.metrics_page import parse_page
from model_server.sim.fleet import Router
from model_server.sim.request import SimRequest
from model_server.sim.snapshot import Snapshot
from tests.harness.envoy import EnvoyProcess, running_envoy
from tests.harness.fake_picker import EnvoyRequest, running_fake_picker
from tests.harness.gateway import as_endpoints, config_in
from tests.harness.model_servers import ModelServer

_SCRAPE_S: Final = 1.0


class StandIn:
    """Stands between Envoy, which asks with a request's id, and a router, which needs the request."""

    def __init__(self, router: Router, addresses: Mapping[str, str], *, clock: RunClock) -> None:
        """`addresses` are by the server names that the router uses."""
        self._router = router
        self._addresses = addresses
        self._clock = clock
        self._waiting: dict[str, SimRequest] = {}
        self._routed: set[int] = set()
        router.set_servers(list(addresses), restarted="", now=0.0)

    def destination(self, exchange: EnvoyRequest) -> str:
        """Return the answer to Envoy. If Envoy sends a request again after a failure, the request goes where
        its fallback says.
        """
        request = self._waiting.pop(exchange.headers[REQUEST_ID], None)
        if request is None:
            return ""
        name = self._router.route(request, now=self._clock())
        if name is None:
            return ""
        self._routed.add(request.request_id)
        return self._addresses[name]

    def begins(self, request: SimRequest) -> None:
        self._waiting[str(request.request_id)] = request

    def first_token(self, request_id: int, *, now: float) -> None:
        if request_id in self._routed:
            self._router.first_token(request_id, now=now)

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        if request_id in self._routed:
            self._routed.discard(request_id)
            self._router.ended(request_id, failed=failed, cached_tokens=cached_tokens, now=now)

    async def scrape(self, name: str, server: ModelServer, session: aiohttp.ClientSession) -> None:
        """Read one server's pages, until cancelled."""
        while True:
            async with session.get(f"{server.url}/metrics") as response:
                page = parse_page(await response.read(), scraped_at=self._clock())
            self._router.scraped(0, name, snapshot_of(page), now=self._clock())
            await asyncio.sleep(_SCRAPE_S)


def snapshot_of(page: EndpointMetrics) -> Snapshot:
    """Return the page in the simulator's terms. Values that a server does not state are 0."""
    return Snapshot(
        taken_s=page.scraped_at,
        running=page.running or 0,
        waiting=page.waiting or 0,
        kv_usage=page.kv_usage or 0.0,
        capacity_tokens=page.capacity_tokens or 0,
        block_tokens=page.block_size or 0,
        prompt_tokens=int(page.prompt_tokens or 0),
        cached_prompt_tokens=int(page.cached_prompt_tokens or 0),
        generated_tokens=int(page.generated_tokens or 0),
        query_tokens=int(page.prefix_queries or 0),
        hit_tokens=int(page.prefix_hits or 0),
        finished=int(page.finished or 0),
        ttft_sum_s=page.ttft_sum_s or 0.0,
        ttft_count=int(page.ttft_count or 0),
        prefill_sum_s=page.prefill_sum_s or 0.0,
        prefill_tokens=int(page.prefill_tokens or 0),
        max_loras=page.max_lora or 0,
        active_adapters=page.active_adapters,
    )


@asynccontextmanager
async def running_stand_in(
    directory: Path,
    router: Router,
    *,
    servers: Sequence[ModelServer],
    session: aiohttp.ClientSession,
    clock: RunClock,
) -> AsyncIterator[tuple[StandIn, EnvoyProcess]]:
    """Run an Envoy in front of the servers, which this rule routes."""
    named = {f"pod-{n}": server for n, server in enumerate(servers)}
    standing = StandIn(router, {name: str(s.address) for name, s in named.items()}, clock=clock)
    config = config_in(directory)
    eds.write(Path(config.envoy.eds_file), as_endpoints([server.address for server in servers]))
    async with running_fake_picker(config.listen.address) as picker:
        picker.destinations = standing.destination
        async with running_envoy(config, directory=directory) as envoy, asyncio.TaskGroup() as group:
            await envoy.wait_endpoints({str(server.address) for server in servers})
            scrapes = [group.create_task(standing.scrape(n, s, session)) for n, s in named.items()]
            try:
                yield standing, envoy
            finally:
                for scrape in scrapes:
                    scrape.cancel()
