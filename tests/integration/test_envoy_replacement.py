"""Another Envoy replaces a running one on the same port, in the way that docs/operations.md describes. No
request is lost.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.harness.client import http_client
from tests.harness.envoy import bootstrap_document, running_envoy
from tests.harness.gateway import running_bootstrap
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

pytestmark = pytest.mark.envoy

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
