"""A worker as a whole: what is made before it serves, and how it starts and stops."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from epp.base.errors import ConfigError
from epp.config.sections import Admin, Envoy, Listen
from epp.config.settings import Config, Log
from epp.serve.app import App
from tests.harness.ports import free_ports

pytestmark = pytest.mark.usefixtures("restored_root")


def config_in(folder: Path, **fields: Any) -> Config:
    file = folder / "endpoints.yaml"
    file.write_text('endpoints: [{name: a, address: "127.0.0.1:1"}]')
    listen, admin = free_ports(2)
    made: dict[str, Any] = {
        "endpoints_file": str(file),
        "listen": Listen(address=f"127.0.0.1:{listen}"),
        "admin": Admin(address=f"127.0.0.1:{admin}"),
        "envoy": Envoy(eds_file=str(folder / "eds.json")),
        "log": Log(level="error"),
    }
    return Config(**(made | fields))


def addresses(file: Path) -> list[int]:
    (resource,) = json.loads(file.read_bytes())["resources"]
    (locality,) = resource["endpoints"]
    return [each["endpoint"]["address"]["socket_address"]["port_value"] for each in locality["lb_endpoints"]]


async def test_the_file_for_envoy_has_the_endpoints_before_the_picker_serves(tmp_path: Path) -> None:
    App(config_in(tmp_path))
    assert addresses(tmp_path / "eds.json") == [1]


async def test_only_the_first_of_several_workers_writes_the_file_for_envoy(tmp_path: Path) -> None:
    App(config_in(tmp_path, workers=2), worker=1)
    assert not (tmp_path / "eds.json").exists()


async def test_a_worker_listens_at_its_own_address_with_the_common_settings(tmp_path: Path) -> None:
    shared = Listen(address="unix:/run/p.sock", transport="grpcio")
    made = App(config_in(tmp_path, workers=2, listen=shared), worker=1)._listen  # noqa: SLF001
    assert made == Listen(address="unix:/run/p.sock.1", transport="grpcio")


async def test_the_error_for_an_unwritable_file_for_envoy_names_its_field(tmp_path: Path) -> None:
    (tmp_path / "eds.json").mkdir()
    with pytest.raises(ConfigError, match=rf"envoy\.edsFile: {tmp_path}/eds\.json: "):
        App(config_in(tmp_path))


async def test_the_error_for_an_admin_address_in_use_names_its_field(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    host, _, port = config.admin.address.rpartition(":")
    server = await asyncio.start_server(lambda *_: None, host, int(port))
    async with server:
        with pytest.raises(ConfigError, match=r"admin\.address: .*is another picker running\?"):
            await App(config).run()
