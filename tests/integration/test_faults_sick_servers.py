"""Model servers that fail, hang, cut their answers or die: what clients of the whole gateway notice."""

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness.backend import GENERATED, Behaviour, MetricsPage
from tests.harness.client import Reply
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy


POLICY = {"scrape": {"intervalSeconds": 0.2, "timeoutSeconds": 1}, "failures": {"trialSeconds": 0.5}}
NUMBERS = count()


async def complete_anew(gateway: Gateway, **fields: Any) -> Reply:
    return await gateway.client.complete(f"prompt {next(NUMBERS)} " + "x" * 400, **fields)


async def ejected(gateway: Gateway, name: str) -> bool:
    return await gateway.picker.metric("epp_endpoint_ejected", endpoint=name) == 1


async def back(gateway: Gateway, name: str) -> None:
    """Wait until a recovered server gets requests again, and not only as trials."""

    async def serves() -> bool:
        replies = await asyncio.gather(*(complete_anew(gateway) for _ in range(16)))
        served = name in {reply.served_by for reply in replies if reply.status == 200}
        return served and not await ejected(gateway, name)

    await wait_until(serves, what=f"{name} serves again")


@pytest.mark.parametrize(
    ("fault", "clients"),
    [
        ({"status": 500}, 12),
        ({"fails_midway_with": 500}, 1),
        ({"chunks": 0}, 1),
        ({"status": 401}, 1),
        ({"status": 302}, 1),
    ],
    ids=["500", "told", "bare", "401", "302"],
)
async def test_a_server_that_says_no_at_once_gets_trials_only_and_comes_back(
    tmp_path: Path, fault: dict[str, Any], clients: int
) -> None:
    """Each client waits for its answer, so a server that fails at once looks idle to it."""
    async with running_gateway(tmp_path, backends=3, policy=POLICY) as gateway:
        for backend in gateway.backends:
            backend.metrics[GENERATED] = 0.0
            backend.behaviour = Behaviour(headers_pause_s=0.01)

        async def send(count: int) -> None:
            async def client() -> None:
                for _ in range(count):
                    await complete_anew(gateway, stream=True)

            await asyncio.gather(*(client() for _ in range(clients)))

        async def noticed() -> bool:
            await send(1)
            return await ejected(gateway, "s0")

        await send(12 // clients)
        sick, healthy = gateway.backends[0], len(gateway.backends[0].prompts)
        sick.behaviour = Behaviour(**fault)
        await wait_until(noticed, what="s0 is ejected")
        bad, bypassed = len(sick.prompts) - healthy, await gateway.envoy.bypassed()
        await send(300 // clients)
        # Envoy sends these itself, if the picker is late.
        bypassed = await gateway.envoy.bypassed() - bypassed
        after = len(sick.prompts) - healthy - bad - bypassed
        assert after <= 6, f"2 % of 300 are trials; {bad} requests came before"
        sick.behaviour = Behaviour()
        await back(gateway, "s0")


@pytest.mark.core
@pytest.mark.parametrize("fault", [{"status": 429}, {"reset": True}], ids=["429", "reset"])
async def test_one_failure_is_enough_and_a_probe_finds_the_recovery(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    async with running_gateway(
        tmp_path, backends=4, policy={**POLICY, "rule": "round-robin"}, models={"ask": False}
    ) as gateway:
        sick = gateway.backends[0]
        sick.behaviour = Behaviour(**fault)
        for _ in range(4):
            await complete_anew(gateway)
        assert len(sick.prompts) == 1
        await wait_until(lambda: ejected(gateway, "s0"), what="probes find out that it fails")
        for _ in range(40):
            assert (await complete_anew(gateway)).status == 200
        assert len(sick.prompts) == 1, "a trial is owed after 64 requests, or once a probe has succeeded"
        assert await gateway.picker.metric("epp_probes_total", verdict="ill") >= 3
        sick.behaviour = Behaviour()
        await gateway.picker.wait_metric("epp_probes_total", at_least=1, verdict="well")
        for _ in range(8):
            assert (await complete_anew(gateway)).status == 200
        assert len(sick.prompts) >= 3, "two trials at once, then its share"
        assert not await ejected(gateway, "s0")


@pytest.mark.core
async def test_a_server_that_hangs_is_ejected_and_comes_back(tmp_path: Path) -> None:
    policy = {**POLICY, "failures": {"trialSeconds": 0.5, "hangSeconds": 0.3}}
    async with running_gateway(tmp_path, backends=4, policy=policy) as gateway:
        gate = gateway.backends[0].behaviour.before_headers
        gate.shut()
        pending: set[asyncio.Task[Reply]] = set()

        async def noticed() -> bool:
            pending.update(asyncio.create_task(complete_anew(gateway)) for _ in range(4))
            return await ejected(gateway, "s0")

        await wait_until(noticed, what="the server is ejected")
        await gateway.picker.process.wait_printed("s0 gets only trial requests: its requests hang")
        held = gate.waiting
        replies = [asyncio.create_task(complete_anew(gateway)) for _ in range(60)]
        await wait_until(lambda: sum(r.done() for r in replies) >= 55, what="the others serve nearly all")
        assert gate.waiting - held <= 5, "trials only"
        gate.open()
        assert {r.status for r in await asyncio.gather(*pending, *replies)} == {200}
        await back(gateway, "s0")


async def test_a_server_that_stops_after_headers_is_ejected_and_comes_back(tmp_path: Path) -> None:
    policy = {**POLICY, "failures": {"trialSeconds": 0.5, "hangSeconds": 0.5}}
    async with running_gateway(tmp_path, backends=4, policy=policy) as gateway:
        for backend in gateway.backends:
            backend.metrics[GENERATED] = 0.0
        sick = gateway.backends[0]
        gate = sick.behaviour.before_body
        gate.shut()
        pending: set[asyncio.Task[Reply]] = set()

        async def noticed() -> bool:
            pending.update(asyncio.create_task(complete_anew(gateway, stream=True)) for _ in range(4))
            return await ejected(gateway, "s0")

        await wait_until(noticed, what="the server is ejected")
        # Before the first verdict a trial is due after two seconds, which 60 requests may take.
        await gateway.picker.wait_metric("epp_probes_total", at_least=1, verdict="ill")
        seen = len(sick.prompts)
        replies = [await complete_anew(gateway, stream=True) for _ in range(60)]
        assert {reply.status for reply in replies} == {200}
        assert len(sick.prompts) == seen, "while probes hang there are no trials: their headers prove nothing"
        gate.open()
        assert {r.status for r in await asyncio.gather(*pending)} == {200}
        await back(gateway, "s0")


async def comes_whole(gateway: Gateway) -> bool:
    """Return whether the answer to one request comes whole."""
    try:
        return (await complete_anew(gateway)).status == 200
    except aiohttp.ClientPayloadError:
        return False


async def cut_answers(gateway: Gateway, name: str) -> float:
    return await gateway.picker.metric("epp_cut_answers_total", endpoint=name)


@pytest.mark.core
async def test_a_server_that_cuts_its_answers_gets_only_trials_and_comes_back(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=4, policy=POLICY) as gateway:
        sick = gateway.backends[0]
        sick.behaviour.cuts = "length"
        seen = 0
        while not await ejected(gateway, "s0"):
            seen += [await comes_whole(gateway) for _ in range(4)].count(False)
        after = [await comes_whole(gateway) for _ in range(60)]
        assert after.count(False) <= 1, "the server gets only trials"
        seen += after.count(False)
        await gateway.picker.process.wait_printed("s0 gets only trial requests: its answers break off midway")
        sick.behaviour = Behaviour()
        await back(gateway, "s0")
        await gateway.picker.wait_metric_is("epp_cut_answers_total", seen, endpoint="s0")
        assert await gateway.picker.metric("epp_protocol_errors_total") == 0


async def test_clients_that_leave_and_answers_that_never_began_are_no_cuts(tmp_path: Path) -> None:
    policy = {**POLICY, "rule": "round-robin"}
    async with running_gateway(tmp_path, backends=3, policy=policy) as gateway:
        left, reset, cuts = gateway.backends
        left.behaviour.before_last.shut()
        left.behaviour.chunks = 2
        opened = 0
        while opened < 8:
            async with gateway.client.stream() as answer:
                if answer.served_by == "s0":
                    await answer.piece()
                    answer.abort()
                    opened += 1
        left.behaviour = Behaviour()
        reset.behaviour.reset = True
        for _ in range(6):
            assert (await complete_anew(gateway)).status == 200, "Envoy repeats the request at another server"
        reset.behaviour = Behaviour()
        cuts.behaviour.cuts = "chunked"
        while await comes_whole(gateway):
            pass
        await gateway.picker.wait_metric_is("epp_cut_answers_total", 1, endpoint="s2")
        assert await cut_answers(gateway, "s0") == await cut_answers(gateway, "s1") == 0
        assert await gateway.picker.metric("epp_endpoint_failure_share", endpoint="s0") == 0


FAST_SCRAPES = {"intervalSeconds": 0.1, "timeoutSeconds": 1, "failuresToEject": 3}


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


async def test_when_two_of_four_servers_die_at_once_no_later_request_fails(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=4) as gateway:
        gates = [backend.behaviour.before_headers for backend in gateway.backends]
        for gate in gates:
            gate.shut()
        pending = [asyncio.create_task(complete_anew(gateway)) for _ in range(24)]
        await wait_until(lambda: sum(g.waiting for g in gates) == 24, what="servers have taken all requests")
        held = gates[0].waiting + gates[1].waiting
        await asyncio.gather(*(backend.stop() for backend in gateway.backends[:2]))
        for gate in gates:
            gate.open()
        statuses = Counter(reply.status for reply in await asyncio.gather(*pending))
        assert {*statuses} <= {200, 503}, "a request fails if both of its servers have died"
        assert statuses[503] <= held < 24
        assert {"s2", "s3"} == set(await distinct_prompts(gateway, 48))


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
    await wait_until(lambda: answers(gateway, 503), what="requests are refused")
    reply = await gateway.client.complete()
    assert reply.json()["error"]["type"] == "service_unavailable"
    await gateway.set_backends(gateway.backends)
    await wait_until(lambda: answers(gateway, 200), what="requests are served")
    await distinct_prompts(gateway)


async def answers(gateway: Gateway, status: int) -> bool:
    return (await gateway.client.complete()).status == status
