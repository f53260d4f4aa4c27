"""The supervisor of several workers, accepted connections that fail, and a cluster that cannot be reached."""

import asyncio
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from epp.base.types import Address
from epp.config.settings import Config
from epp.transport.accepting import Acceptor
from tests.harness.gateway import config_in, running_picker, starting_picker, write_eds, write_endpoints
from tests.harness.kubeconfig import write_kubeconfig
from tests.harness.ports import free_port
from tests.harness.processes import wait_until


def _gone(pid: int) -> bool:
    """Return whether the process has ended, or is a zombie that nobody has waited for."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


async def test_workers_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    config = config_in(tmp_path, workers=2, drainSeconds=1)
    write_endpoints(config, [])
    async with running_picker(config, directory=tmp_path) as picker:
        workers = picker.worker_pids()
        assert len(workers) == 2
        picker.process.signal(signal.SIGKILL)
        await wait_until(lambda: all(map(_gone, workers)), what="both workers end")


async def test_a_configuration_that_a_worker_cannot_use_ends_them_all(tmp_path: Path) -> None:
    config = config_in(tmp_path, workers=2, drainSeconds=1)
    write_endpoints(config, [])
    second = Address.parse(config.admin.address).port + 1
    with socket.create_server(("127.0.0.1", second)):
        async with starting_picker(config, directory=tmp_path) as picker:
            assert await picker.process.wait() == 2
            assert "admin.address" in picker.process.tail()


async def test_a_connection_that_fails_at_its_beginning_stops_no_other() -> None:
    async def fail(_: socket.socket) -> None:
        raise ConnectionResetError

    acceptor = Acceptor(fail)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    acceptor.start(listener)
    for _ in range(2):
        with socket.create_connection(address) as client:
            client.setblocking(False)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 30) == b""
    await acceptor.stop()
    assert not acceptor.listening


async def test_a_connection_without_room_is_closed_at_once() -> None:
    welcomed: list[socket.socket] = []
    faults: list[str] = []

    async def welcome(sock: socket.socket) -> None:
        welcomed.append(sock)

    acceptor = Acceptor(welcome, has_room=lambda *_: False, on_fault=faults.append)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    acceptor.start(listener)
    with socket.create_connection(address) as client:
        client.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 30) == b""
    await acceptor.stop()
    assert (welcomed, faults) == ([], ["too_many_connections"])


@pytest.mark.parametrize("known", [True, False], ids=["after a restart", "for the first time"])
async def test_the_picker_waits_and_envoy_keeps_its_endpoints(tmp_path: Path, known: bool) -> None:  # noqa: FBT001 - a case
    nobody = write_kubeconfig(tmp_path, server=f"http://127.0.0.1:{free_port()}", user={"token": "t"})
    config: Config = config_in(
        tmp_path, endpointsFile="", kubernetes={"pool": "vllm", "kubeconfig": str(nobody)}
    )
    eds_file = Path(config.envoy.eds_file)
    if known:
        write_eds(eds_file, [Address("10.0.0.1", 8000)])
    before = eds_file.read_bytes() if known else b""
    async with starting_picker(config, directory=tmp_path) as picker:

        async def cannot_follow() -> bool:
            try:
                page = await picker.metrics()
            except aiohttp.ClientConnectionError:
                return False
            return 'epp_kubernetes_followed{resource="pool"} 0.0' in page

        await wait_until(cannot_follow, what="the picker says that it cannot follow the pool")
        assert not await picker.ready()
        assert "waiting for the API server" in (await picker.page("readyz"))["reason"]
        assert "The API server does not show the pool" in str((await picker.page("live"))["problems"])
        if known:
            assert eds_file.read_bytes() == before
        else:
            assert b"10.0.0" not in eds_file.read_bytes(), (
                "the file is empty, since Envoy does not start without a file"
            )
        assert await picker.process.terminate() == 0
