"""A running picker gets to a limit of its process: of memory, or of file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until

pytest_plugins = ["tests.harness.fixtures"]
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


async def test_a_picker_without_memory_serves_or_fails_open_and_then_serves_again(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=2) as gateway:
        pid = gateway.picker.process.pid
        with limited(pid, resource.RLIMIT_AS, address_space(pid) + 8 * _MIB):
            statuses = await asyncio.gather(*(answered(gateway, f"{n}" * 12_000_000) for n in range(4)))
            assert statuses == [200] * 4, "Envoy routes what the picker cannot take"
        assert await answered(gateway, "hello") == 200
        assert "MemoryError" in gateway.picker.process.tail()


async def test_a_picker_without_file_descriptors_says_so_and_recovers(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, backends=2) as gateway:
        pid = gateway.picker.process.pid
        with limited(pid, resource.RLIMIT_NOFILE, 3):
            await wait_until(
                lambda: "Too many open files" in gateway.picker.process.tail(), what="the picker says so"
            )
            assert await answered(gateway, "hello") == 200
        await gateway.picker.metrics()
        assert await answered(gateway, "hello") == 200
