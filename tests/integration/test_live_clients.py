"""The `openai` and `anthropic` clients through Envoy and the picker, on real vLLM and on the model server of
this repository. What a server cannot do is its own refusal, as the client's typed error.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from tests.harness.envoy import running_envoy
from tests.harness.gateway import PickerProcess, config_in, running_picker
from tests.harness.model_servers import MODEL, running_model_servers
from tests.harness.processes import wait_until
from tests.vllm_env import live_clients
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.gateway import running_vllm_gateway
from tests.vllm_env.server import MODEL_NAME, VllmServer

pytest_plugins = ["tests.vllm_env.fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.envoy, pytest.mark.timeout(900)]

REFUSED = {
    "wrong model": "NotFoundError 404",
    "wrong model of messages": "NotFoundError 404",
    "too long": "BadRequestError 400",
}
NOT_BY_VLLM = {
    "image by data": "BadRequestError 400",
    "a tool that must be used": "BadRequestError 400",
    "embeddings": "NotFoundError 404",
}
"""The tiny model takes texts only, makes no embeddings, and is served without a parser of calls."""
NOT_BY_US = dict.fromkeys(("image by data", "messages with thinking"), "BadRequestError 400")


async def outcomes(environment: VllmEnvironment, url: str, model: str, *, words: int) -> dict[str, str]:
    process = await asyncio.create_subprocess_exec(
        environment.python, live_clients.__file__, url, model, str(words), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, str] = json.loads(printed.splitlines()[-1])
    return {name: outcome for name, outcome in found.items() if outcome != "ok"}


async def nothing_is_left(picker: PickerProcess) -> None:
    async def idle() -> bool:
        return await picker.metric("epp_in_flight") == 0

    await wait_until(idle, what="no request is booked any more")


async def test_clients_get_from_vllm_what_it_gives(
    tmp_path: Path, vllm_environment: VllmEnvironment, vllm_servers: tuple[VllmServer, VllmServer]
) -> None:
    async with running_vllm_gateway(tmp_path, vllm_servers) as gateway:
        refused = await outcomes(vllm_environment, gateway.envoy.url, MODEL_NAME, words=100_000)
        assert refused == REFUSED | NOT_BY_VLLM
        await nothing_is_left(gateway.picker)


async def test_clients_get_from_the_model_server_what_it_gives(
    tmp_path: Path, vllm_environment: VllmEnvironment
) -> None:
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(running_model_servers(tmp_path, count=2))
        config = config_in(tmp_path)
        listed = [{"name": server.name, "address": str(server.address)} for server in servers]
        Path(config.endpoints_file).write_text(yaml.safe_dump({"endpoints": listed}))
        picker = await stack.enter_async_context(running_picker(config, directory=tmp_path))
        await wait_until(Path(config.envoy.eds_file).exists, what="the picker writes the endpoints file")
        envoy = await stack.enter_async_context(running_envoy(config, directory=tmp_path))
        await envoy.wait_endpoints({str(server.address) for server in servers})
        refused = await outcomes(vllm_environment, envoy.url, MODEL, words=400_000)
        assert refused == REFUSED | NOT_BY_US
        await nothing_is_left(picker)
