"""The `openai`, `anthropic` and `langchain-openai` clients through Envoy and the picker, on real vLLM and on
the model server of this repository. What a server cannot do is its own refusal, as the client's typed error.
"""

import asyncio
import json
from base64 import b64decode
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from model_server.server.refused import NO_EFFECT
from tests.clients_env import every_call, live_clients
from tests.contract.test_request_fields import OURS
from tests.group_env import CLIENTS
from tests.harness.gateway import PickerProcess, config_in, running_front, write_endpoints
from tests.harness.model_servers import MODEL, running_model_servers
from tests.harness.prepared import prepared
from tests.vllm_env import picture_model, tiny_model
from tests.vllm_env.environment import REQUIRED, VllmEnvironment
from tests.vllm_env.gateway import CHAT, running_vllm_gateway
from tests.vllm_env.server import MODEL_NAME, ServerOptions, VllmServer

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(900)]

UNSEEN = "https://127.0.0.1:1/no.png"
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
BY_THE_CLIENT = {"betas", "extra_body", "extra_headers", "extra_query", "parse_as", "text_format", "timeout"}
BY_THE_CLIENT |= {"response_id", "starting_after"}
"""Parameters that are no fields of a request."""
IGNORED = {
    "chat": "moderation prediction prompt_cache_options prompt_cache_retention safety_identifier store verbosity",
    "responses": "access_programs background_options context_management image moderation multi_agent"
    " prompt_cache_options prompt_cache_retention safety_identifier stream_options verbosity",
}
"""Fields of the client that vLLM's request classes lack. vLLM ignores them, and so does this server."""


async def outcomes(script: ModuleType, *words: str) -> dict[str, Any]:
    python = prepared(CLIENTS.require, required_by=REQUIRED).python
    process = await asyncio.create_subprocess_exec(
        python, "-W", "ignore", str(script.__file__), *words, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


async def refused_cases(*words: str) -> dict[str, str]:
    found = await outcomes(live_clients, *words)
    return {name: outcome for name, outcome in found.items() if outcome != "ok"}


@pytest.mark.vllm
async def test_clients_get_from_vllm_what_it_gives(
    tmp_path: Path, vllm_servers: tuple[VllmServer, VllmServer]
) -> None:
    async with running_vllm_gateway(tmp_path, vllm_servers) as gateway:
        assert await refused_cases(gateway.envoy.url, MODEL_NAME, "100000", UNSEEN) == REFUSED | NOT_BY_VLLM
        await gateway.picker.idle()


@pytest.mark.vllm
async def test_vllm_takes_pictures_and_the_picker_foresees_its_hit(
    tmp_path: Path, vllm_environment: VllmEnvironment
) -> None:
    async def show(_: web.Request) -> web.Response:
        return web.Response(body=b64decode(live_clients.SOURCE["data"]), content_type="image/png")

    site = web.Application()
    site.router.add_get("/a.png", show)
    tiny = vllm_environment.model_folder / tiny_model.MODEL
    model = picture_model.write(tmp_path / "model", tiny=tiny)
    options = ServerOptions(model=model, arguments=("--load-format", "dummy"))
    async with AsyncExitStack() as stack:
        server = stack.enter_context(
            VllmServer(vllm_environment, name="sees", folder=tmp_path, options=options)
        )
        url = str((await stack.enter_async_context(TestServer(site))).make_url("/a.png"))
        gateway = await stack.enter_async_context(running_vllm_gateway(tmp_path, (server,)))
        found = await outcomes(live_clients, gateway.envoy.url, MODEL_NAME, "100000", url)
        images = {name: outcome for name, outcome in found.items() if name.startswith("image")}
        assert images == dict.fromkeys(images, "ok")
        question = {"type": "text", "text": "What is on this picture? " * 200}
        for shown in (live_clients.PIXEL, url):
            asked = [*live_clients.picture(shown)[0]["content"], question]
            turns = [[{"role": "user", "content": [*asked, {"type": "text", "text": end}]}] for end in "xy"]
            first, second = [await gateway.route(CHAT, messages=turn) for turn in turns]
            assert first.prompt_tokens > picture_model.PICTURE_TOKENS
            assert second.cached_tokens > 0.9 * second.prompt_tokens
            # By its first guess of 4 bytes a token; the tiny model's have 2.5.
            assert second.predicted_tokens > 0.5 * second.prompt_tokens


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
        assert await refused_cases(url, MODEL, "400000", UNSEEN) == REFUSED


async def test_each_call_of_openai_is_answered_or_refused_in_its_shape(tmp_path: Path) -> None:
    async with our_gateway(tmp_path) as (url, _):
        calls = await outcomes(every_call, url, MODEL)
    found = {name: outcome for name, (outcome, *_) in calls.items()}
    unsent = {name for name, outcome in found.items() if outcome.startswith("not sent")}
    assert {name: found.get(name) for name in unsent ^ NOT_SENT} == {}
    answered = {name for name, outcome in found.items() if outcome == "answered"}
    assert {name.removeprefix("beta.") for name in answered} == ANSWERED
    wrong = {name: found[name] for name in found.keys() - answered - unsent if found[name] != "refused"}
    assert wrong == {}
    assert len(found) > 400

    known = {api: {*body.__struct_fields__, *neutral, *NO_EFFECT} for api, body, neutral in OURS}
    ignored: defaultdict[str, set[str]] = defaultdict(set)
    for name in answered:
        api = name.removeprefix("beta.").partition(".")[0]
        ignored[api].update(set(calls[name][1:]) - known.get(api, set()) - BY_THE_CLIENT)
    advice = "put a new field into model_server/server/refused.py, or into IGNORED if vLLM lacks it too"
    assert {api: " ".join(sorted(fields)) for api, fields in ignored.items() if fields} == IGNORED, advice
