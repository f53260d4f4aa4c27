"""The bundled Valkey: its configuration on the real server, and its password."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aredis
from redis.exceptions import AuthenticationError, RedisError

from tests.charts.rendering import GATEWAY, Helm, Manifest, of_kind
from tests.cluster.installed import valkey_image
from tests.harness.ports import free_port
from tests.harness.processes import managed_process

pytestmark = pytest.mark.cluster


def command_of(objects: list[Manifest], *, password_file: Path, data: Path) -> list[str | Path]:
    """Return the command of the pod's container, with the two folders at other places."""
    deployment = of_kind(objects, "Deployment", "gateway-prefix-gateway-valkey")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words: list[str] = [*container["command"], *container["args"]]
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/etc/valkey", "/data"]
    assert words.count("/data") == 1
    moved = [word.replace("/etc/valkey/password", str(password_file)) for word in words]
    return [str(data) if word == "/data" else word for word in moved]


@pytest.fixture
def path_with_valkey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{valkey_image().folders[0]}:{os.environ['PATH']}")


@pytest.mark.usefixtures("path_with_valkey")
@pytest.mark.parametrize("mine", ["", r'it"s \n $(mine) `now` #1'], ids=["the chart's", "one's own"])
async def test_real_server_runs_as_in_pod_and_lets_in_only_clients_with_password(
    helm: Helm, tmp_path: Path, mine: str
) -> None:
    values: dict[str, Any] = {
        "maxMemoryMiB": 77,
        "maxValueMiB": 1,
        "existingSecret": "mine" if mine else "",
    }
    objects = helm.render(GATEWAY, {"valkey": values})
    password = mine or of_kind(objects, "Secret")["stringData"]["password"]
    password_file = tmp_path / "password"
    password_file.write_text(f"{password}\n")
    port = free_port()
    command = command_of(objects, password_file=password_file, data=tmp_path)
    command += ["--port", str(port), "--bind", "127.0.0.1"]
    async with managed_process("valkey", command, directory=tmp_path) as process:
        async with aredis.Redis(port=port, password=password, protocol=2) as client:

            async def answers() -> bool:
                try:
                    return bool(await client.execute_command("PING"))  # type: ignore[no-untyped-call]  # redis-py
                except AuthenticationError:
                    raise
                except (RedisError, OSError):
                    return False

            await process.wait_ready(answers)
            settings = await client.config_get("maxmemory*")
            assert settings["maxmemory"] == str(77 * 2**20)
            assert settings["maxmemory-policy"] == "noeviction"
            assert (await client.config_get("save"))["save"] == ""
            assert (await client.config_get("appendonly"))["appendonly"] == "no"
            assert await client.set("x", b"x" * 2**20)
            with pytest.raises((RedisError, OSError)):
                await client.set("x", b"x" * (2**20 + 1))
            assert await client.strlen("x") == 2**20
        async with aredis.Redis(port=port, protocol=2) as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.get("x")


@pytest.mark.usefixtures("path_with_valkey")
async def test_valkey_does_not_start_with_an_empty_password(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render(GATEWAY, {"valkey": {"existingSecret": "mine"}})
    (tmp_path / "password").write_text("\n")
    command = command_of(objects, password_file=tmp_path / "password", data=tmp_path)
    async with managed_process("valkey", command, directory=tmp_path) as process:
        assert await process.wait() == 1


def test_existing_secret_is_used_by_valkey_and_pickers_and_none_is_made(helm: Helm) -> None:
    objects = helm.render(GATEWAY, {"valkey": {"existingSecret": "mine"}})
    assert not [each for each in objects if each["kind"] == "Secret"]
    secrets = {
        each["metadata"]["name"]: [
            volume["secret"]["secretName"]
            for volume in each["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        ]
        for each in objects
        if each["kind"] == "Deployment"
    }
    assert secrets == {"gateway-prefix-gateway": ["mine"], "gateway-prefix-gateway-valkey": ["mine"]}
    again = helm.render(GATEWAY, {"valkey": {"existingSecret": "mine"}})
    assert again == objects, "a tool that only renders finds nothing to change"


def test_valkey_restarts_with_a_new_password_of_the_charts_own_secret(helm: Helm) -> None:
    def checksum_and_password() -> tuple[str, str]:
        objects = helm.render(GATEWAY)
        template = of_kind(objects, "Deployment", "gateway-prefix-gateway-valkey")["spec"]["template"]
        checksum = template["metadata"]["annotations"]["checksum/password"]
        return checksum, of_kind(objects, "Secret")["stringData"]["password"]

    (first, one), (second, other) = checksum_and_password(), checksum_and_password()
    assert one != other, "rendered without a cluster"
    assert first != second
    assert first == sha256(one.encode()).hexdigest(), "the same password is the same pod"
