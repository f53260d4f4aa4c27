"""A running picker gets to a limit of its process: of memory, or of file descriptors."""

import asyncio
import contextlib
import re
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until
from tests.harness.redis_server import faulty, running_redis

pytestmark = pytest.mark.envoy

_MIB = 2**20


@contextlib.contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    usual = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, usual)


def address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


async def answered(gateway: Gateway, prompt: str) -> int:
    return (await gateway.client.complete(prompt)).status


async def test_picker_without_memory_serves_or_fails_open_and_then_serves_again(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=2) as gateway:
        pid = gateway.picker.process.pid

        async def exhausted() -> bool:
            statuses = await asyncio.gather(*(answered(gateway, f"{n}" * 12_000_000) for n in range(6)))
            assert statuses == [200] * 6, "Envoy routes what the picker cannot take"
            return "MemoryError" in gateway.picker.process.tail()

        with limited(pid, resource.RLIMIT_AS, address_space(pid) + 4 * _MIB):
            await wait_until(exhausted, what="a body finds no room")
        assert await answered(gateway, "hello") == 200


async def test_without_file_descriptors_scrapes_and_sharing_fail_and_recover(tmp_path: Path) -> None:
    """A server and Redis come back meanwhile, so both need new connections."""
    async with (
        running_redis(tmp_path) as redis,
        running_gateway(tmp_path, backends=2, sharing={"redis": {"url": redis.url}}) as gateway,
        AsyncExitStack() as stack,
    ):
        picker, again = gateway.picker, gateway.backends[0]

        async def scraped() -> bool:
            return await picker.metric("epp_endpoint_scrape_age_seconds", endpoint=again.name) < 3

        def logged(pattern: str) -> bool:
            return re.search(pattern, picker.process.stderr.read_text()) is not None

        await picker.wait_metric_is("epp_sharing_connected", 1)
        with limited(picker.process.pid, resource.RLIMIT_NOFILE, 3):
            await again.stop()
            await again.start()
            async with faulty(redis, "killed", stack, directory=tmp_path):
                pass
            for line in (
                f"scrape of {again.name} at .* fails: ",  # of a cut answer, if one was on its way
                r"cannot send to .*Too many open files",
            ):
                await wait_until(partial(logged, line), what=line)
            assert await answered(gateway, "hello") == 200
        await wait_until(scraped, what="the server is scraped again")
        await picker.wait_metric_is("epp_sharing_connected", 1)
        assert await answered(gateway, "hello") == 200
