"""Model servers die, come and go, or show nonsense as metrics. The tests check what clients of the whole
gateway notice.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.harness.backend import MetricsPage
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

FAST_SCRAPES = {"intervalSeconds": 0.1, "timeoutSeconds": 0.3, "failuresToEject": 3}


async def distinct_prompts(gateway: Gateway, count: int = 24) -> list[str]:
    """Send the prompts at once. Return which server answered each."""
    prompts = (f"prompt {n} " + "x" * (40 * n) for n in range(count))
    replies = await asyncio.gather(*(gateway.client.complete(p) for p in prompts))
    assert [r.status for r in replies] == [200] * count
    return [r.served_by for r in replies]


@pytest.mark.core
@pytest.mark.parametrize(("killed", "retries"), [({"s0"}, 1), ({"s0", "s1"}, 2)])
async def test_requests_that_a_killed_server_had_taken_are_served_by_others(
    tmp_path: Path, killed: set[str], retries: int
) -> None:
    async with running_gateway(tmp_path, envoy={"numRetries": retries}) as gateway:
        for backend in gateway.backends:
            backend.behaviour.before_headers.shut()
        pending = asyncio.create_task(distinct_prompts(gateway))
        gates = [b.behaviour.before_headers for b in gateway.backends]
        await wait_until(lambda: sum(g.waiting for g in gates) == 24, what="servers have taken all requests")
        assert gates[0].waiting > 0
        await asyncio.gather(*(b.stop() for b in gateway.backends if b.name in killed))
        for gate in gates:
            gate.open()
        assert killed.isdisjoint(await pending)


@pytest.mark.core
async def test_a_request_that_ends_its_servers_ends_two_of_four_and_no_more(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=4) as gateway:
        for backend in gateway.backends:
            backend.behaviour.dies_of = b"poison"
        first = await gateway.client.complete("poison")
        assert (first.status, sum(b.alive for b in gateway.backends)) == (503, 2)
        again = await gateway.client.complete("poison")
        assert (again.status, again.json()["error"]["code"]) == (503, "fatal_request")
        assert 0 < int(again.headers["retry-after"]) <= 300
        assert sum(b.alive for b in gateway.backends) == 2
        await distinct_prompts(gateway)


@pytest.mark.parametrize("page", ["hang", "garbage"])
async def test_routing_goes_on_while_one_server_shows_no_metrics_and_it_returns(
    tmp_path: Path, page: MetricsPage
) -> None:
    async with running_gateway(tmp_path, policy={"scrape": FAST_SCRAPES, "rule": "random"}) as gateway:
        odd = gateway.backends[0]
        odd.metrics_page = page
        seen = len(odd.received)
        await wait_until(lambda: len(odd.received) >= seen + 5, what="the server was scraped five more times")
        await distinct_prompts(gateway)
        assert await gateway.envoy.bypassed() == 0
        odd.metrics_page = "normal"

        async def serves_again() -> bool:
            return "s0" in await distinct_prompts(gateway, 6)

        await wait_until(serves_again, what="the server serves again")


@pytest.mark.core
async def test_without_endpoints_it_is_503_and_with_them_again_it_serves(gateway: Gateway) -> None:
    assert (await gateway.client.complete()).status == 200
    await gateway.set_backends([])
    await wait_until(lambda: refuses(gateway), what="requests are refused")
    reply = await gateway.client.complete()
    assert reply.json()["error"]["type"] == "service_unavailable"
    await gateway.set_backends(gateway.backends)
    await wait_until(lambda: serves(gateway), what="requests are served")
    await distinct_prompts(gateway)


async def refuses(gateway: Gateway) -> bool:
    return (await gateway.client.complete()).status == 503


async def serves(gateway: Gateway) -> bool:
    return (await gateway.client.complete()).status == 200
