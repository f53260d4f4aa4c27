"""lora-sync against our model server over HTTP, and the command with its status page and exit codes."""

from __future__ import annotations

import http.client
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from model_server.cli import main
from model_server.core.request import Adapter
from model_server.core.scheduler import SchedulerLimits
from model_server.pods.sync.client import AdapterServer
from model_server.pods.sync.command import status_page
from model_server.pods.sync.sync import LoraSync
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings
from model_server.server.serve import Server, ServerSettings, listening
from tests.harness.clock import Clock


@dataclass
class SyncedServer:
    """A server, the file, and a sync between them. The test moves the time of the sync."""

    server: Server
    file: Path
    client: AdapterServer
    sync: LoraSync
    clock: Clock

    def want(self, **adapters: str) -> None:
        listed = [{"name": name, "path": path} for name, path in adapters.items()]
        self.file.write_text(yaml.safe_dump({"adapters": listed}))

    def serve(self, name: str, path: str) -> None:
        self.server.models.load(Adapter(name, path))

    def served(self) -> dict[str, str]:
        return {adapter.name: adapter.path for adapter in self.server.models.adapters}

    def states(self) -> dict[str, str]:
        return {line["name"]: line["state"] for line in self.sync.status()["adapters"]}


def settings_of(**changes: Any) -> ServerSettings:
    return ServerSettings(
        allow_runtime_lora_updating=True,
        port=0,
        model="demo",
        limits=SchedulerLimits(),
        backend=CostSettings(costs=CostModel(speed=1000)),
        drain_timeout_s=0.01,
        **changes,
    )


@asynccontextmanager
async def site_of(file: Path, *, prune: bool = False) -> AsyncIterator[SyncedServer]:
    settings = settings_of(adapters=(Adapter("built-in", "/b"),))
    async with AsyncExitStack() as stack:
        server = Server(settings)
        port = await stack.enter_async_context(listening(server, settings))
        client = await stack.enter_async_context(AdapterServer(f"http://127.0.0.1:{port}/"))
        clock = Clock(100.0)
        sync = LoraSync(file=file, server=client, clock=clock, rng=random.Random(1), prune=prune)
        yield SyncedServer(server, file, client, sync, clock)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[SyncedServer]:
    async with site_of(tmp_path / "adapters.yaml") as site:
        yield site


async def test_the_server_follows_the_file_and_keeps_the_adapters_from_its_start(site: SyncedServer) -> None:
    site.want(sql="/sql/1", law="/law")
    await site.sync.sync()
    assert site.served() == {"built-in": "/b", "sql": "/sql/1", "law": "/law"}
    assert site.sync.in_sync
    site.want(sql="/sql/2")
    await site.sync.sync()
    assert site.served() == {"built-in": "/b", "sql": "/sql/2"}
    assert site.states() == {"sql": "loaded", "built-in": "foreign"}
    site.want()
    await site.sync.sync()
    assert site.served() == {"built-in": "/b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("adapters: [", "not YAML"),
        ("", "Expected `object`"),
        ("adapters: [{name: a}]", "missing required field"),
        ("adapters: [{name: a, path: ''}]", "needs a name and a path"),
        ("adapters: [{name: a, path: /1}, {name: a, path: /2}]", "twice"),
    ],
)
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_reported(
    site: SyncedServer, text: str | None, message: str
) -> None:
    site.want(sql="/sql")
    await site.sync.sync()
    site.file.unlink()
    if text is not None:
        site.file.write_text(text)
    site.server.models.unload("sql")
    await site.sync.sync()
    assert site.served()["sql"] == "/sql"  # the last good file stays in force
    assert message in site.sync.status()["file_error"]
    assert not site.sync.in_sync
    site.want(sql="/sql")
    await site.sync.sync()
    assert site.sync.in_sync


async def test_a_server_that_is_away_is_reported_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "adapters.yaml"
    async with site_of(file) as site:
        site.want(sql="/sql")
        await site.sync.sync()
        assert site.sync.in_sync
        sync = site.sync
        site.client.url, there = "http://127.0.0.1:9", site.client.url
        await sync.sync()
        assert "127.0.0.1:9" in sync.status()["server_error"]
        assert not sync.in_sync
        site.client.url = there
        await sync.sync()
        assert sync.status()["server_error"] is None
        assert sync.in_sync


async def test_the_status_page_says_what_the_sync_knows(site: SyncedServer) -> None:
    async with (
        status_page(site.sync, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http_client,
    ):
        async with http_client.get("/ready") as answer:
            assert answer.status == 503
        site.want(sql="/sql")
        await site.sync.sync()
        async with http_client.get("/ready") as answer:
            assert answer.status == 200
        async with http_client.get("/status") as answer:
            said = await answer.json()
    assert said == site.sync.status()
    assert (said["in_sync"], said["adapters"][0]["state"]) == (True, "loaded")


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "model_server", *flags]


def test_the_command_runs_once_or_until_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text("adapters: [{name: sql, path: /sql}]")
    serve = command("serve", "--port", "0", "--model", "demo", "--allow-runtime-lora-updating")
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            sync = command("lora-sync", "--server", url, "--file", str(file))
            once = subprocess.run([*sync, "--once"], capture_output=True, text=True, check=False)
            assert once.returncode == 0, once.stderr
            assert json.loads(once.stdout)["adapters"][0]["state"] == "loaded"
            file.write_text("adapters: [{name: demo, path: /x}]")
            assert subprocess.run([*sync, "--once"], capture_output=True, check=False).returncode == 1
            with subprocess.Popen(
                [*sync, "--status-port", "0"], stdout=subprocess.PIPE, text=True
            ) as running:
                assert running.stdout is not None
                port = int(running.stdout.readline().split(":")[2].split("/")[0])
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                client.request("GET", "/status")
                assert json.loads(client.getresponse().read())["server"] == url
                client.close()
                running.send_signal(signal.SIGTERM)
                assert running.wait(timeout=30) == 0
        finally:
            server.kill()


def test_senseless_flags_and_a_missing_server_have_their_exit_codes(tmp_path: Path) -> None:
    file = str(tmp_path / "adapters.yaml")
    assert main(["lora-sync", "--server", "localhost:8000", "--file", file]) == 2
    assert main(["lora-sync", "--server", "http://x", "--file", file, "--interval-s", "0"]) == 2
    away = command("lora-sync", "--server", "http://127.0.0.1:9", "--file", file, "--once")
    (tmp_path / "adapters.yaml").write_text("adapters: []")
    assert subprocess.run(away, capture_output=True, check=False).returncode == 1
