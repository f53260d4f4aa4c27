"""`epp up` as a person runs it: one command before two servers, with the real Envoy."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from epp.config.settings import load_config
from epp.serve.cli import main
from tests.harness.backend import running_backends
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
            await wait_until(lambda: "curl" in process.tail(), what="the announcement", timeout_s=60)
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
