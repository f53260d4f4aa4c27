"""`epp up` as a person runs it: one command before two servers, with the real Envoy."""

import asyncio
import json
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
import yaml

from epp.config.settings import load_config
from epp.serve.cli import main
from epp.serve.up import ServerName, look_up
from tests.harness.backend import running_backends
from tests.harness.certificate import write_tls
from tests.harness.ports import free_ports
from tests.harness.processes import managed_process, wait_until

pytestmark = pytest.mark.envoy


@pytest.mark.core
async def test_one_command_starts_a_gateway_and_a_signal_ends_it(tmp_path: Path) -> None:
    port, page = free_ports(2)
    files = tmp_path / "files"
    async with running_backends(2) as (a, b), aiohttp.ClientSession() as session:
        servers = ("--server", f"http://{a.address}/v1", "--server", f"localhost:{b.address.port}")
        where = ("--port", str(port), "--page", str(page), "--write", str(files))
        command = [sys.executable, "-m", "epp", "up", *servers, *where]
        async with managed_process("up", command, directory=tmp_path) as process:
            await process.wait_printed("curl")
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            for _ in range(4):
                async with session.post(url, json=body) as answer:
                    assert answer.status == 200, await answer.text()
            async with session.get(f"http://127.0.0.1:{page}/decisions") as answer:
                kinds = [each["kind"] for each in (await answer.json())["decisions"]]
                assert kinds.count("chat") == 4
            assert f"http://127.0.0.1:{page}/" in process.tail()
            config = load_config(files / "config.yaml")
            assert json.loads(Path(config.envoy.eds_file).read_text())
            (envoy,) = process.children()
            process.signal(signal.SIGINT)
            assert await process.wait() == 0
            await wait_until(lambda: not Path(f"/proc/{envoy}/exe").exists(), what="Envoy ends")
    with pytest.raises(SystemExit, match="2"):
        await asyncio.to_thread(main, ["up", *where])
    assert await asyncio.to_thread(main, ["up", *servers, *where]) == 2, "its files are not overwritten"
    other = (*where[:4], "--policy", str(files / "config.yaml"), "--write", str(tmp_path / "other"))
    assert await asyncio.to_thread(main, ["up", *servers, *other]) == 2, "as `epp check` refuses it"
    assert not (tmp_path / "other").exists()


async def test_with_a_certificate_clients_speak_tls_and_the_curl_line_too(tmp_path: Path) -> None:
    port, page = free_ports(2)
    tls = write_tls(tmp_path)
    async with running_backends(1) as (backend,), aiohttp.ClientSession() as session:
        where = ("--port", str(port), "--page", str(page), "--tls", tls.cert_file, tls.key_file)
        command = [sys.executable, "-m", "epp", "up", "--server", str(backend.address), *where]
        async with managed_process("up", command, directory=tmp_path) as process:
            printed = await process.wait_printed("curl")
            assert f"curl -k https://127.0.0.1:{port}/v1/chat/completions" in printed
            trusted = ssl.create_default_context(cafile=tls.cert_file)
            url = f"https://localhost:{port}/v1/chat/completions"
            async with session.post(url, json={"model": "m", "messages": []}, ssl=trusted) as answer:
                assert answer.status == 200, await answer.text()


async def test_a_name_that_changes_its_addresses_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not lines:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(0, 0, 0, "", (address, 8000)) for address in lines]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found: dict[ServerName, Sequence[str]] = {ServerName("vllm", 8000): ["10.0.0.1"]}
    for lines[:], expected in (
        (["10.0.0.2", "10.0.0.3"], ["10.0.0.2:8000", "10.0.0.3:8000"]),
        ([], ["10.0.0.2:8000", "10.0.0.3:8000"]),
        (["10.0.0.4", "fd00::4"], ["10.0.0.4:8000"]),
    ):
        await look_up(tmp_path, found)
        listed = yaml.safe_load((tmp_path / "endpoints.yaml").read_text())["endpoints"]
        assert [each["address"] for each in listed] == expected
