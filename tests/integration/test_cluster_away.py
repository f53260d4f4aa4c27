"""A picker that should follow a cluster and cannot reach the cluster. The picker runs and is not ready, and
it does not change the endpoints that Envoy knows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import aiohttp
import pytest

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.settings import Config
from epp.serve.envoy import files
from tests.harness.gateway import PickerProcess, config_in
from tests.harness.ports import free_port
from tests.harness.processes import managed_process, wait_until


def kubeconfig_to(port: int, folder: Path) -> Path:
    path = folder / "kubeconfig"
    cluster = {"server": f"http://127.0.0.1:{port}"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "c", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "n"}}],
    }
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("known", [True, False], ids=["after a restart", "for the first time"])
async def test_the_picker_waits_and_envoy_keeps_its_endpoints(tmp_path: Path, known: bool) -> None:  # noqa: FBT001 - a case
    nobody = kubeconfig_to(free_port(), tmp_path)
    config: Config = config_in(
        tmp_path, endpointsFile="", kubernetes={"pool": "vllm", "kubeconfig": str(nobody)}
    )
    eds_file = Path(config.envoy.eds_file)
    if known:
        files.write_endpoints(eds_file, [Endpoint(EndpointName("a"), Address("10.0.0.1", 8000))])
    before = eds_file.read_bytes() if known else b""
    args = [sys.executable, "-m", "epp", "serve", "--config", str(tmp_path / "config.yaml")]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        managed_process("picker", args, directory=tmp_path) as process,
    ):
        picker = PickerProcess(process, config=config, session=session)

        async def says_so() -> bool:
            try:
                page = await picker.metrics()
            except aiohttp.ClientConnectionError:
                return False
            return 'epp_kubernetes_followed{resource="pool"} 0.0' in page

        await wait_until(says_so, what="the picker says that it cannot follow the pool")
        async with session.get(f"{picker.admin_urls[0]}/readyz") as response:
            assert response.status == 503
            assert "waiting for the API server" in await response.text()
        if known:
            assert eds_file.read_bytes() == before
        else:
            assert b"10.0.0" not in eds_file.read_bytes(), (
                "the file is empty, since Envoy does not start without a file"
            )
        assert await process.terminate() == 0
