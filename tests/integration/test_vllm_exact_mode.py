"""Exact mode on real vLLM: its blocks are those in vLLM's events, and the table follows the events."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.config.sections import ExactMode
from epp.picker.decision import Question
from epp.picker.picker import Picker
from epp.request.parse import parse_request
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.language import FolderLanguage
from epp.sources.kvevents.mapping import read_conversation
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.service import ExactService
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task
from tests.invariants.kvevents import check_exact, nodes_of
from tests.invariants.picker import check_picker
from tests.vllm_env import tiny_model
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.prompts import prose
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME, VllmServer

# The first test waits for the servers to start.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class FollowedServers:
    picker: Picker
    service: ExactService
    exact: Exact
    servers: Mapping[EndpointName, VllmServer]

    async def ask(self, path: str, *, only: EndpointName, **fields: Any) -> None:
        """Send one request to this server and end it, as a gateway would."""
        body = json.dumps({"model": MODEL_NAME, "max_tokens": 2, "temperature": 0, **fields}).encode()
        inference = parse_request(path, body)
        address = next(e.address for e in self.picker.news.endpoints() if e.name == only)
        request = Question("r", inference, body_bytes=len(body), subset=frozenset({address}))
        loop = asyncio.get_running_loop()
        pick = self.picker.pick(request, now=loop.time())
        answer = await asyncio.to_thread(self.servers[only].post, path, body)
        assert answer.status == 200, answer.body
        self.picker.on_response_headers(pick, status=200, served=address, now=loop.time())
        self.picker.end(pick, outcome="ended", now=loop.time())

    def believed(self, path: str, **fields: Any) -> dict[EndpointName, int]:
        body = json.dumps({"model": MODEL_NAME, **fields}).encode()
        return self.picker.caches.table.match(self.picker.caches.chain(parse_request(path, body)))

    def prompts(self, what: str) -> int:
        model = self.service.status.models.get("")
        return -1 if model is None else model.prompts[what]

    async def until(self, condition: Callable[[], bool]) -> None:
        await wait_until(condition, what="the service has read the events", timeout_s=120)


@contextlib.asynccontextmanager
async def following_vllm(
    servers: tuple[VllmServer, VllmServer], environment: VllmEnvironment
) -> AsyncIterator[FollowedServers]:
    named = {EndpointName(server.name): server for server in servers}
    endpoints = [
        Endpoint(
            name,
            Address.parse(server.address),
            adapters=frozenset(tiny_model.ADAPTERS),
            kv_events=f"ipc://{server.options.kv_events_socket}",
            kv_replay=f"ipc://{server.options.kv_events_socket}.replay",
        )
        for name, server in named.items()
    ]
    settings = ModelSettings(
        language=FolderLanguage(environment.model_folder / tiny_model.MODEL),
        adapters={name: name for name in tiny_model.ADAPTERS},
    )
    queue = RoutedPrompts(max_prompts=100, max_bytes=10**7)
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    picker.subscribe(queue.on_event)
    picker.news.set_endpoints(endpoints, now=0.0)
    exact = Exact({"": settings}, max_blocks=10**5, max_chunks=10**4)
    service = ExactService(picker, queue, lambda: exact, ExactMode(models=(), topic="kv-events"))
    service.set_endpoints(endpoints)
    async with running_task(service.run):
        running = FollowedServers(picker, service, exact, named)
        # Prompts are skipped until an event shows how the servers name blocks.
        first = {"model": MODEL_NAME, "prompt": prose("first event", words=60), "max_tokens": 1}
        servers[0].post(COMPLETIONS, first)
        await running.until(lambda: [m.state for m in service.status.models.values()] == ["checking"])
        yield running
    check_exact(exact)
    check_picker(picker)


def messages(name: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": prose(f"system {name}", words=200)},
        {"role": "user", "content": [{"type": "text", "text": prose(f"user {name}", words=100)}]},
        {"role": "assistant", "content": "Ünïcödé, 漢字 and  spaces."},
        {"role": "user", "content": "And?"},
    ]


async def test_every_block_of_routed_prompts_has_name_that_vllms_events_give_it(
    vllm_servers: tuple[VllmServer, VllmServer], vllm_environment: VllmEnvironment
) -> None:
    first = EndpointName(vllm_servers[0].name)
    async with following_vllm(vllm_servers, vllm_environment) as here:
        asked: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": messages("plain")}),
            (CHAT, {"messages": messages("salted"), "cache_salt": "tenant-7"}),
            (CHAT, {"messages": messages("adapter"), "model": tiny_model.ADAPTERS[0]}),
            (COMPLETIONS, {"prompt": prose("completion", words=300)}),
            (COMPLETIONS, {"prompt": [random.Random(3).randrange(50, 4000) for _ in range(200)]}),
        ]
        for path, fields in asked:
            await here.ask(path, only=first, **fields)
        # The request renders its prompt in its own way.
        await here.ask(CHAT, only=first, messages=messages("deep"), chat_template_kwargs={"thinking": True})
        await here.until(lambda: here.prompts("matched") == len(asked))
        await here.until(lambda: "arguments" in here.service.status.models[""].prompts)
        model = here.service.status.models[""]
        assert (model.state, model.prompts["missed"], model.prompts["arguments"]) == ("on", 0, 1)
        assert (model.algorithm, model.block_tokens) == ("sha256", BLOCK_TOKENS)
        server = here.service.status.servers[first]
        assert (server.state, server.reason) == ("following", "")
        # Every block of every chain is known to be held, not only one block of each.
        chunks = {node for node in nodes_of(here.exact.tree) if node.blocks}
        assert chunks
        assert all(map(here.exact.known[first].holds, chunks))


async def test_a_late_picker_learns_the_other_servers_blocks_by_the_first_prompt(
    vllm_servers: tuple[VllmServer, VllmServer], vllm_environment: VllmEnvironment
) -> None:
    first, second = (EndpointName(server.name) for server in vllm_servers)
    fields = {"messages": messages("held before")}
    answer = vllm_servers[0].post(CHAT, {"model": MODEL_NAME, "max_tokens": 2, **fields})
    assert answer.status == 200, answer.body
    async with following_vllm(vllm_servers, vllm_environment) as here:
        assert here.believed(CHAT, **fields) == {}
        await here.ask(CHAT, only=second, **fields)
        await here.until(lambda: here.believed(CHAT, **fields).keys() == {first, second})


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": " hello  "}],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [{"role": "user", "content": "x", "name": "bob"}, {"role": "assistant", "content": "漢字 ünïcödé"}],
    [{"role": "user", "content": "x"}, {"role": "tool", "content": "42", "tool_call_id": "c1"}],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_tokens_of_a_conversation_are_vllms(
    vllm_servers: tuple[VllmServer, VllmServer],
    vllm_environment: VllmEnvironment,
    conversation: list[dict[str, Any]],
) -> None:
    asked = {"model": MODEL_NAME, "messages": conversation}
    theirs = vllm_servers[0].post("/tokenize", asked)
    assert theirs.status == 200, theirs.body
    body = json.dumps({"model": MODEL_NAME, "messages": conversation}).encode()
    read, _, _ = read_conversation(parse_request(CHAT, body).prompt)
    language = FolderLanguage(vllm_environment.model_folder / tiny_model.MODEL)
    ours = language.tokens(language.render(read, tools=None), special=False)
    assert list(ours.ids) == theirs.json()["tokens"]
