"""Which server gets a request, through the real Envoy on our bootstrap. The picker answers as the test tells
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epp.base.types import Address
from tests.harness.envoy import connection_manager
from tests.harness.fake_picker import DESTINATION
from tests.harness.gateway import EnvoyBench, running_bootstrap
from tests.harness.ports import free_port

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


async def test_the_subset_hint_of_an_earlier_filter_reaches_the_picker(tmp_path: Path) -> None:
    hint = {"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000", "[fd00::1]:8000"]}

    def set_hint(document: dict[str, Any]) -> None:
        set_metadata = {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": hint}],
            },
        }
        connection_manager(document)["http_filters"].insert(0, set_metadata)

    async with running_bootstrap(tmp_path, edit=set_hint) as bench:
        await bench.client.complete()
        assert bench.picker.exchanges[-1].metadata == {"envoy.lb.subset_hint": hint}


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
