"""Redis is away for a while, stalled, full or refuses, and pickers behind one Envoy have a steady load of
conversations. No request fails, and the servers' hits come back. `pytest -s` prints the figures of each
phase.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.steady_load import Phase
from tests.harness.model_servers import MODEL, running_model_servers
from tests.harness.processes import wait_until
from tests.harness.redis_server import Fault, RedisServer, faulty, running_redis
from tests.harness.replicas import Replicas, running_replicas
from tests.harness.talks import Talks, recent, talks

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = [pytest.mark.envoy, pytest.mark.slow]

OUTAGE_S = 15.0
REPLICAS = 3
USERS = 8
ENOUGH = 96
"""Enough requests for two conversations of each user."""


@dataclass(slots=True)
class OutageSite:
    redis: RedisServer
    replicas: Replicas
    load: Talks
    directory: Path
    stack: AsyncExitStack


@asynccontextmanager
async def running_site(directory: Path) -> AsyncIterator[OutageSite]:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(running_redis(directory))
        servers = await stack.enter_async_context(
            running_model_servers(directory, count=4, flags=("--speed", "10", "--num-blocks", "8192"))
        )
        replicas = await stack.enter_async_context(
            running_replicas(
                directory, servers=servers, replicas=REPLICAS, sharing={"redis": {"url": redis.url}}
            )
        )
        await replicas.wait_met()
        load = await stack.enter_async_context(talks(replicas.envoy.url, model=MODEL, users=USERS))
        yield OutageSite(redis, replicas, load, directory, stack)
        print(f"\n{load.table()}\nanswered without a picker: {await replicas.envoy.bypassed()}")


async def usual(site: OutageSite) -> Phase:
    with site.load.phase("before") as phase:
        await wait_until(lambda: len(phase.outcomes) >= ENOUGH, what="the usual hits", timeout_s=240)
    return phase


async def hold_through(site: OutageSite, fault: Fault, *, seconds: float, usual_hits: float) -> None:
    """Cause the fault, and check the requests and the hits until hits are as before."""
    async with faulty(site.redis, fault, site.stack, directory=site.directory):
        with site.load.phase(fault) as meanwhile:
            began_at = time.monotonic()

            async def noticed() -> bool:
                return await site.replicas.total("epp_sharing_connected") == 0

            await wait_until(noticed, what=f"all pickers notice that it is {fault}", timeout_s=120)
            await wait_until(
                lambda: time.monotonic() - began_at >= seconds and len(meanwhile.outcomes) >= ENOUGH // 2,
                what="the fault lasts",
                timeout_s=seconds + 120,
            )
    with site.load.phase(f"{fault}, over") as after:
        await site.replicas.wait_met()
        await hits_again(after, usual_hits=usual_hits)


async def hits_again(after: Phase, *, usual_hits: float) -> None:
    """Wait until hits are as they were. Those of single conversations differ a little."""
    await wait_until(
        lambda: len(after.outcomes) >= ENOUGH // 2 and recent(after, ENOUGH).hit_ratio >= 0.95 * usual_hits,
        what=f"hits are {usual_hits:.2f} again",
        timeout_s=240,
    )


@pytest.mark.timeout(900)
async def test_with_redis_killed_no_request_fails_and_hits_come_back(tmp_path: Path) -> None:
    async with running_site(tmp_path) as site:
        before = await usual(site)
        await hold_through(site, "killed", seconds=OUTAGE_S, usual_hits=before.hit_ratio)
        assert site.load.faults == []
        assert await site.replicas.total("epp_sharing_dropped_events_total") == 0


@pytest.mark.timeout(900)
async def test_a_stalled_full_or_refusing_redis_fails_no_request(tmp_path: Path) -> None:
    faults: list[Fault] = ["stalled", "full", "refusing", "read-only"]
    async with running_site(tmp_path) as site:
        before = await usual(site)
        for fault in faults:
            await hold_through(site, fault, seconds=0.0, usual_hits=before.hit_ratio)
        assert site.load.faults == []
