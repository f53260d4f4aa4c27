"""The supervisor of several workers: what ends it, and what ends together with it."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from epp.base.types import Address
from tests.harness.gateway import config_in, write_endpoints
from tests.harness.processes import ManagedProcess, connects, managed_process, wait_until


def _gone(pid: int) -> bool:
    """Return whether the process has ended, or is a zombie that nobody has waited for."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


async def _both_answer(process: ManagedProcess, first: Address) -> None:
    async def answer() -> bool:
        return await connects(first.host, first.port) and await connects(first.host, first.port + 1)

    await process.wait_ready(answer)


async def test_workers_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    config = config_in(tmp_path, workers=2, drainSeconds=1)
    write_endpoints(config, [])
    command = [sys.executable, "-m", "epp", "serve", "--config", str(tmp_path / "config.yaml")]
    async with managed_process("epp", command, directory=tmp_path) as process:
        await _both_answer(process, Address.parse(config.admin.address))
        workers = process.children()
        assert len(workers) == 2
        process.signal(signal.SIGKILL)
        await wait_until(lambda: all(map(_gone, workers)), what="both workers end")


async def test_a_configuration_that_a_worker_cannot_use_ends_them_all(tmp_path: Path) -> None:
    config = config_in(tmp_path, workers=2, drainSeconds=1)
    write_endpoints(config, [])
    second = Address.parse(config.admin.address).port + 1
    command = [sys.executable, "-m", "epp", "serve", "--config", str(tmp_path / "config.yaml")]
    with socket.create_server(("127.0.0.1", second)):
        async with managed_process("epp", command, directory=tmp_path) as process:
            assert await process.wait() == 2
            assert "admin.address" in process.tail()
