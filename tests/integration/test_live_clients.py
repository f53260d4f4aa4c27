"""The `openai`, `anthropic` and `langchain-openai` clients through Envoy and the picker, on real vLLM and on
the model server of this repository. What a server cannot do is its own refusal, as the client's typed error.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests.clients_env import every_call, live_clients
from tests.group_env import CLIENTS
from tests.harness.gateway import PickerProcess, config_in, running_front, write_endpoints
from tests.harness.model_servers import MODEL, running_model_servers
from tests.harness.prepared import prepared
from tests.vllm_env.environment import REQUIRED
from tests.vllm_env.gateway import running_vllm_gateway
from tests.vllm_env.server import MODEL_NAME, VllmServer

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(900)]

REFUSED = {
    "wrong model": "NotFoundError 404",
    "wrong model of messages": "NotFoundError 404",
    "LangChain asks for a wrong model": "OpenAIModelNotFoundError 404",
    "too long": "BadRequestError 400",
}
NOT_BY_VLLM = {
    "a tool that must be used": "BadRequestError 400",
    "LangChain and tools": "OpenAIInvalidRequestError 400",
    "LangChain's tools by responses": "ValueError",
    "LangChain's structured output": "LengthFinishReasonError",
    "messages with a tool's result": "BadRequestError 400",
    **{f"image {at}": "BadRequestError 400" for at in ("by data", "by URL", "in a message", "in a response")},
    "embeddings": "NotFoundError 404",
    "LangChain's embeddings": "NotFoundError 404",
}
"""The tiny model takes texts, makes no embeddings, ends no object, and has no parser of calls."""
NOT_BY_US = {"messages with thinking": "BadRequestError 400"}
ANSWERED = {
    "completions.create",
    "embeddings.create",
    "models.list",
    *(f"chat.completions.{call}" for call in ("create", "parse", "stream")),
    *(f"responses.{call}" for call in ("create", "parse", "stream")),
}
NOT_SENT = {
    "admin.organization.external_keys.create",
    "audio.voices.create",
    "beta.agents.automations.create",
    "beta.agents.environments.files.create",
    "beta.agents.environments.files.prepare",
    "beta.agents.environments.files.prepare_directory",
    "beta.agents.environments.files.upload",
    "beta.agents.sessions.artifacts.for_result",
    "beta.realtime.connect",
    "uploads.upload_file_chunked",
    "webhooks.unwrap",
    "webhooks.verify_signature",
}
"""Calls that ask no server, or whose arguments every_call.py cannot make up."""


async def outcomes(script: ModuleType, *words: str) -> dict[str, str]:
    python = prepared(CLIENTS.require, required_by=REQUIRED).python
    process = await asyncio.create_subprocess_exec(
        python, "-W", "ignore", str(script.__file__), *words, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, str] = json.loads(printed.splitlines()[-1])
    return found


async def refused_cases(*words: str) -> dict[str, str]:
    found = await outcomes(live_clients, *words)
    return {name: outcome for name, outcome in found.items() if outcome != "ok"}


@pytest.mark.vllm
async def test_clients_get_from_vllm_what_it_gives(
    tmp_path: Path, vllm_servers: tuple[VllmServer, VllmServer]
) -> None:
    async with running_vllm_gateway(tmp_path, vllm_servers) as gateway:
        assert await refused_cases(gateway.envoy.url, MODEL_NAME, "100000") == REFUSED | NOT_BY_VLLM
        await gateway.picker.idle()


@asynccontextmanager
async def our_gateway(tmp_path: Path) -> AsyncIterator[tuple[str, PickerProcess]]:
    config = config_in(tmp_path)
    async with running_model_servers(tmp_path, count=2) as servers:
        write_endpoints(config, servers)
        addresses = [server.address for server in servers]
        async with running_front(config, directory=tmp_path, servers=addresses) as (picker, envoy, _):
            yield envoy.url, picker
            await picker.idle()


async def test_clients_get_from_the_model_server_what_it_gives(tmp_path: Path) -> None:
    async with our_gateway(tmp_path) as (url, _):
        assert await refused_cases(url, MODEL, "400000") == REFUSED | NOT_BY_US


async def test_each_call_of_openai_is_answered_or_refused_in_its_shape(tmp_path: Path) -> None:
    async with our_gateway(tmp_path) as (url, _):
        found = await outcomes(every_call, url, MODEL)
    unsent = {name for name, outcome in found.items() if outcome.startswith("not sent")}
    assert {name: found.get(name) for name in unsent ^ NOT_SENT} == {}
    answered = {name for name, outcome in found.items() if outcome == "answered"}
    assert {name.removeprefix("beta.") for name in answered} == ANSWERED
    wrong = {name: found[name] for name in found.keys() - answered - unsent if found[name] != "refused"}
    assert wrong == {}
    assert len(found) > 400
