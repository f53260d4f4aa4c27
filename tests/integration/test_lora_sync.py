"""lora-sync against our model server over HTTP, and the command with its status page and exit codes."""

import random
from pathlib import Path

import aiohttp
import yaml

from model_server.cli import main
from model_server.core.request import Adapter
from model_server.pods.lora_sync import AdapterServer, LoraSync, status_page
from model_server.server.serve import Server, listening
from tests.harness.clock import Clock
from tests.harness.http_model_server import quick


async def test_the_server_follows_the_file_and_keeps_the_adapters_from_its_start(tmp_path: Path) -> None:
    settings = quick(model="demo", allow_runtime_lora_updating=True, adapters=(Adapter("built-in", "/b"),))
    server, file = Server(settings), tmp_path / "adapters.yaml"

    async def served(**wanted: str) -> dict[str, str]:
        listed = [{"name": name, "path": path} for name, path in wanted.items()]
        file.write_text(yaml.safe_dump({"adapters": listed}))
        await sync.sync()
        return {adapter.name: adapter.path for adapter in server.models.adapters}

    async with (
        listening(server, settings) as port,
        aiohttp.ClientSession() as session,
    ):
        client = AdapterServer(f"http://127.0.0.1:{port}/", session)
        sync = LoraSync(file=file, server=client, clock=Clock(100.0), rng=random.Random(1), prune=False)
        async with (
            status_page(sync, host="127.0.0.1", port=0) as page,
            aiohttp.ClientSession(f"http://127.0.0.1:{page}") as probe,
        ):
            for ready in (503, 200):
                async with probe.get("/ready") as answer:
                    assert answer.status == ready
                assert await served(sql="/1", law="/law") == {"built-in": "/b", "sql": "/1", "law": "/law"}
        assert await served(sql="/2") == {"built-in": "/b", "sql": "/2"}
        assert await served() == {"built-in": "/b"}
        client.url, there = "http://127.0.0.1:9", client.url
        await sync.sync()
        assert "127.0.0.1:9" in sync.status()["server_error"]
        client.url = there
        await sync.sync()
        assert sync.in_sync


def test_senseless_flags_have_their_exit_code(tmp_path: Path) -> None:
    file = str(tmp_path / "adapters.yaml")
    assert main(["lora-sync", "--server", "localhost:8000", "--file", file]) == 2
    assert main(["lora-sync", "--server", "http://x", "--file", file, "--interval-s", "0"]) == 2
