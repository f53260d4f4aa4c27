"""Which server gets a request, through the real Envoy on our bootstrap, while endpoints and Envoys change."""

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest

from epp.base.types import Address
from epp.serve.envoy.files import render_endpoints
from tests.harness.backend import running_backend
from tests.harness.client import SERVED_BY, http_client
from tests.harness.envoy import MODEL_SERVERS, bootstrap_document, running_envoy
from tests.harness.fake_picker import DESTINATION
from tests.harness.gateway import EnvoyBench, running_bootstrap, running_gateway
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy


def dead_address() -> Address:
    return Address("127.0.0.1", free_port())


@pytest.mark.core
async def test_a_dead_first_choice_is_replaced_by_the_next_in_the_list(tmp_path: Path) -> None:
    dead = dead_address()
    async with running_bootstrap(tmp_path, extra=[dead]) as bench:
        alive = bench.backends[1]
        bench.picker.always(dead, alive.address)
        replies = [await bench.client.complete() for _ in range(4)]
        assert [(r.status, r.served_by) for r in replies] == [(200, "s1")] * 4
        assert {e.served for e in bench.picker.exchanges} == {str(alive.address)}


@pytest.mark.parametrize("fault", ["refuses", "resets"])
async def test_retries_go_down_the_list_in_order(tmp_path: Path, fault: str) -> None:
    async with running_bootstrap(tmp_path, backends=3) as bench:
        first, second, other = (bench.backends[n] for n in (2, 0, 1))
        first.behaviour.fail_next, first.behaviour.reset = int(fault == "refuses"), fault == "resets"
        bench.picker.always(first.address, second.address, other.address)
        assert (await bench.client.complete()).served_by == second.name
        assert [len(b.prompts) for b in (first, second, other)] == [1, 1, 0]


async def test_the_answer_of_a_server_that_keeps_refusing_reaches_the_client(bench: EnvoyBench) -> None:
    for backend in bench.backends:
        backend.behaviour.fail_next = 10
    reply = await bench.client.complete()
    assert (reply.status, reply.body) == (503, b"failing as told")


async def test_an_error_that_is_not_retriable_reaches_the_client_at_once(bench: EnvoyBench) -> None:
    bench.backends[0].behaviour.fail_next = 1
    bench.backends[0].behaviour.fail_status = 500
    bench.picker.always(bench.backends[0].address, bench.backends[1].address)
    reply = await bench.client.complete()
    assert (reply.status, reply.served_by) == (500, "s0")


async def test_an_endpoint_that_envoy_does_not_hold_is_passed_over(bench: EnvoyBench) -> None:
    unknown = dead_address()
    bench.picker.always(unknown, bench.backends[1].address)
    assert [(await bench.client.complete()).served_by for _ in range(4)] == ["s1"] * 4
    bench.picker.always(unknown)
    assert {(await bench.client.complete()).served_by for _ in range(4)} == {"s0", "s1"}


@pytest.mark.core
async def test_a_client_never_chooses_its_server(bench: EnvoyBench) -> None:
    """This holds when the picker names another server, when the picker names none, and when the picker is
    gone.
    """
    wanted, other = bench.backends
    claim = {DESTINATION: str(wanted.address), "X-Gateway-Destination-Endpoint": str(wanted.address)}
    bench.picker.always(other.address)
    assert [(await bench.client.complete(headers=claim)).served_by for _ in range(4)] == ["s1"] * 4
    assert all(DESTINATION not in e.headers for e in bench.picker.exchanges)
    assert all(r.headers[DESTINATION] == str(other.address) for r in other.prompts)

    bench.picker.always()
    await spread_without_header(bench, claim)
    await bench.picker.stop()
    await spread_without_header(bench, claim)


async def spread_without_header(bench: EnvoyBench, claim: dict[str, str]) -> None:
    before = [len(b.prompts) for b in bench.backends]
    replies = [await bench.client.complete(headers=claim) for _ in range(6)]
    assert sorted(r.served_by for r in replies) == ["s0"] * 3 + ["s1"] * 3
    for backend, seen in zip(bench.backends, before, strict=True):
        assert all(DESTINATION not in r.headers for r in backend.prompts[seen:])


async def test_websockets_bypass_the_picker(bench: EnvoyBench) -> None:
    claim = {DESTINATION: str(bench.backends[0].address)}
    served = set()
    for _ in range(4):
        async with bench.client.websocket("/ws", headers=claim) as socket:
            await socket.send_str("hello")
            name, _, echo = (await socket.receive_str()).partition(": ")
            assert echo == "hello"
            served.add(name)
    assert served == {"s0", "s1"}
    assert bench.picker.exchanges == []
    assert all(DESTINATION not in r.headers for b in bench.backends for r in b.prompts)


async def test_an_ipv6_endpoint_serves(bench: EnvoyBench) -> None:
    async with running_backend("six", host="::1") as six:
        await bench.set_endpoints([six.address])
        bench.picker.always(six.address)
        assert (await bench.client.complete()).served_by == "six"
        assert bench.picker.exchanges[-1].served == str(six.address)


async def test_a_removed_endpoint_finishes_its_running_answers(bench: EnvoyBench) -> None:
    removed, kept = bench.backends
    bench.picker.always(removed.address)
    removed.behaviour.before_last.shut()
    async with bench.client.stream() as answer:
        await bench.set_endpoints([kept.address])
        assert (await bench.client.complete()).served_by == "s1", "the pick names an endpoint that is gone"
        removed.behaviour.before_last.open()
        assert b"[DONE]" in await answer.rest()


async def test_a_broken_file_changes_no_endpoint(bench: EnvoyBench) -> None:
    path = Path(bench.config.envoy.eds_file)
    broken = path.with_suffix(".broken")
    broken.write_bytes(render_endpoints([])[:40])
    rejected = f"{MODEL_SERVERS}update_failure"
    before = await bench.envoy.stat(rejected) + await bench.envoy.stat(f"{MODEL_SERVERS}update_rejected")
    broken.replace(path)

    async def noticed() -> bool:
        after = await bench.envoy.stat(rejected) + await bench.envoy.stat(f"{MODEL_SERVERS}update_rejected")
        return after > before

    await wait_until(noticed, what="Envoy refuses the file")
    assert await bench.envoy.endpoints() == {str(b.address) for b in bench.backends}
    assert (await bench.client.complete()).status == 200
    await bench.set_endpoints([bench.backends[0].address])


_REQUEST = {"model": "base", "prompt": "the same of all clients " * 40, "max_tokens": 1}


async def _served(url: str, client_address: str) -> str:
    connector = aiohttp.TCPConnector(local_addr=(client_address, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{url}/v1/completions", json=_REQUEST) as response,
    ):
        assert response.status == 200
        return response.headers[SERVED_BY]


async def test_each_client_address_keeps_its_server(tmp_path: Path) -> None:
    """Envoy appends the peer's address to `x-forwarded-for`, so the header may name the session."""
    policy = {"rule": "session", "sessionHeader": "x-forwarded-for"}
    async with running_gateway(tmp_path, policy=policy) as gateway:
        clients = [f"127.0.0.{n}" for n in range(2, 10)]
        rounds = []
        for _ in range(5):
            await gateway.picker.reads_bodies()
            rounds.append(await asyncio.gather(*(_served(gateway.envoy.url, client) for client in clients)))
    assert rounds == [rounds[0]] * 5
    assert len(set(rounds[0])) > 1


DRAIN = Path(__file__).parents[2] / "deploy" / "helm" / "prefix-gateway" / "files" / "drain.sh"


async def test_a_second_envoy_on_the_same_port_takes_over_without_a_lost_request(tmp_path: Path) -> None:
    async with running_bootstrap(tmp_path) as bench:
        new_admin = msgspec.structs.replace(bench.config.envoy, admin=f"127.0.0.1:{free_port()}")
        config = msgspec.structs.replace(bench.config, envoy=new_admin)
        long = bench.backends[0]
        bench.picker.always(long.address)
        long.behaviour.before_last.shut()
        in_flight = asyncio.create_task(bench.client.complete("long", stream=True))
        await long.behaviour.before_last.wait_waiting(1)
        bench.picker.always(bench.backends[1].address)
        statuses: list[int] = []
        over = asyncio.Event()

        async def client() -> None:
            """Keeps its connection for as long as the gateway does."""
            async with http_client(bench.envoy.url) as kept:
                while not over.is_set():
                    statuses.append((await kept.complete()).status)

        clients = [asyncio.create_task(client()) for _ in range(4)]
        other = tmp_path / "other"
        other.mkdir()
        async with running_envoy(config, directory=other, document=bootstrap_document(config)) as second:
            before = len(statuses)
            port = bench.config.envoy.admin.rpartition(":")[2]
            drain = await asyncio.create_subprocess_exec("bash", DRAIN, port, "1", "120")
            await wait_until(lambda: len(statuses) > before + 40, what="clients go on meanwhile")
            assert drain.returncode is None, "the first Envoy waits for the long answer"
            long.behaviour.before_last.open()
            assert b"[DONE]" in (await in_flight).body
            await asyncio.wait_for(drain.wait(), 120)
            await bench.envoy.process.terminate()
            served = await second.stat("http.gateway.downstream_rq_completed")
            after = len(statuses)
            await wait_until(lambda: len(statuses) > after + 20, what="the second Envoy serves alone")
            over.set()
            await asyncio.gather(*clients)
            assert await second.stat("http.gateway.downstream_rq_completed") > served
        assert set(statuses) == {200}
