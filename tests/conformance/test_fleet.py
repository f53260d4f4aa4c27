"""Rows 7 and 9: what the picker learns of its servers from the data plane and from the servers' metrics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from epp.base.types import Address
from epp.tools.conformance.dataplane import BUFFERED, DUPLEX, Mode
from tests.conformance.picker import CALM, OwnPicker, PickerUnderTest, own_picker
from tests.harness.backend import Backend
from tests.harness.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

how_served_is_told = pytest.mark.parametrize("attribute", [False, True], ids=["metadata", "attribute"])

VLLM = """\
# HELP vllm:num_requests_running Requests in the batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters="legal"} 1.7e+09
"""
OLDER_VLLM = VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
SIMULATOR = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 2
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,legal",waiting_lora_adapters=""} 1.7e+09
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 16000.0
# TYPE sglang:page_size gauge
sglang:page_size{model_name="m",tp_rank="0"} 16.0
"""
TRTLLM = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 3.0
# TYPE trtllm_num_requests_waiting gauge
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 2.0
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.25
# TYPE trtllm_kv_cache_max_blocks gauge
trtllm_kv_cache_max_blocks{model_name="m",engine_type="trtllm"} 1000.0
# TYPE trtllm_kv_cache_tokens_per_block gauge
trtllm_kv_cache_tokens_per_block{model_name="m",engine_type="trtllm"} 16.0
"""
TRITON = """\
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="m",request_type="active",version="1"} 5
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 2
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 1000
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 16
"""
PAGES = {
    "vllm": VLLM,
    "older_vllm": OLDER_VLLM,
    "llm-d-inference-sim": SIMULATOR,
    "sglang": SGLANG,
    "trtllm-serve": TRTLLM,
    "triton": TRITON,
}
FAST = {**CALM, "scrape": {"intervalSeconds": 0.1, "failuresToEject": 100}}


class PagedBackend(Backend):
    """A model server with a scripted metrics page."""

    page = ""

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.page)


@asynccontextmanager
async def paged_backend(name: str, page: str) -> AsyncIterator[PagedBackend]:
    backend = PagedBackend(name, address=Address("127.0.0.1", free_port()))
    backend.page = page
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


def prompt(text: str) -> bytes:
    return json.dumps({"model": "m", "prompt": f"{text} and more words. " * 100}).encode()


async def in_flight_by_address(picker: OwnPicker) -> dict[str, int]:
    """Return the requests in flight by address, for the addresses that have any."""
    listed = (await picker.admin("/endpoints"))["endpoints"]
    return {e["address"]: e["in_flight"] for e in listed if e["in_flight"]}


@how_served_is_told
@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX], ids=["buffered", "full_duplex"])
async def test_row_07_the_booking_moves_to_who_served(
    ours: OwnPicker, mode: Mode, *, attribute: bool
) -> None:
    """Another endpoint served than the first choice. The picker books the request there, counts the
    difference, and expects the prompt in the cache of that endpoint.
    """
    body = prompt(f"moved by {mode} {attribute}")
    before = await ours.running.metric("epp_served_mismatch_total")
    async with ours.exchange(mode) as exchange:
        await exchange.send(body)
        first, second = exchange.destinations[:2]
        assert await in_flight_by_address(ours) == {first: 1}
        await exchange.respond(b"{}", served=second, attribute=attribute)
        assert await in_flight_by_address(ours) == {second: 1}
        await exchange.finish()
    assert await in_flight_by_address(ours) == {}
    assert await ours.running.metric("epp_served_mismatch_total") == before + 1
    assert [(await ours.route(mode, body)).destinations[0] for _ in range(3)] == [second] * 3


@how_served_is_told
async def test_row_07_the_booking_stays_if_the_picked_endpoint_served(
    ours: OwnPicker, *, attribute: bool
) -> None:
    """The first choice served: the picker counts no difference, and the decision names the server."""
    before = await ours.running.metric("epp_served_mismatch_total")
    name = f"as-picked-{attribute}"
    async with ours.exchange() as exchange:
        await exchange.send(prompt(name), headers=[("x-request-id", name)])
        first = exchange.destinations[0]
        await exchange.respond(b"{}", served=first, attribute=attribute)
        assert await in_flight_by_address(ours) == {first: 1}
        await exchange.finish()
    assert await ours.running.metric("epp_served_mismatch_total") == before
    decision = await ours.admin(f"/decisions/{name}")
    assert (decision["served"], decision["outcome"]) == (first, "ended")


async def test_row_07_a_server_that_is_not_ours_leaves_no_booking(ours: OwnPicker) -> None:
    """The data plane may have sent the request anywhere. The picker counts and forgets an address that is not
    ours, and text that is no address.
    """
    for served in ("203.0.113.7:1", "no address", "[2001:db8::1]:80"):
        async with ours.exchange() as exchange:
            await exchange.send(prompt(served))
            await exchange.respond(b"{}", served=served)
            await exchange.finish()
        assert await in_flight_by_address(ours) == {}


async def test_row_07_the_prompt_is_expected_where_it_was_served(picker: PickerUnderTest) -> None:
    """The test sees only picks: after another endpoint served a prompt, the same prompt goes to that
    endpoint.
    """
    for n in range(3):
        body = prompt(f"served elsewhere {n}")
        async with picker.exchange() as exchange:
            await exchange.send(body)
            served = exchange.destinations[1]
            await exchange.respond(b"{}", served=served)
            await exchange.finish()
        assert (await picker.route(BUFFERED, body)).destinations[0] == served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(
    controllable: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, tuple[OwnPicker, PagedBackend]]]:
    """Our picker over one server of each kind."""
    async with AsyncExitStack() as stack:
        backends = {
            kind: await stack.enter_async_context(paged_backend(kind, page)) for kind, page in PAGES.items()
        }
        directory = tmp_path_factory.mktemp("mixed")
        picker = await stack.enter_async_context(
            own_picker(directory, backends=list(backends.values()), policy=FAST)
        )
        yield {kind: (picker, backend) for kind, backend in backends.items()}


@pytest.mark.parametrize("kind", PAGES)
async def test_row_09_the_servers_metrics_are_understood(
    mixed: dict[str, tuple[OwnPicker, PagedBackend]], kind: str
) -> None:
    """Queue, running, KV use, cache size and LoRA adapters, under the names of each kind of server."""
    picker, backend = mixed[kind]
    expected: dict[str, Any] = {"running": 3, "waiting": 2, "kv_usage": 0.25, "capacity_tokens": 16000}
    if kind not in ("sglang", "trtllm-serve", "triton"):
        expected["adapters"] = ["legal", "sql"]
    await picker.wait_endpoint(str(backend.address), **expected)


@pytest.mark.parametrize("kind", PAGES)
async def test_row_09_load_that_a_server_reports_steers_the_pick(
    mixed: dict[str, tuple[OwnPicker, PagedBackend]], kind: str
) -> None:
    """The picker chooses the only endpoint whose queue is empty, whoever sent the requests that wait at the
    others.
    """
    picker, idle = mixed[kind]
    busy = {backend: PAGES[name].replace(" 2", " 500") for name, (_, backend) in mixed.items()}
    try:
        for backend, page in busy.items():
            backend.page = (
                page if backend is not idle else PAGES[kind].replace(" 2", " 0").replace(" 3", " 0")
            )
        for backend in busy:
            await picker.wait_endpoint(str(backend.address), waiting=0 if backend is idle else 500)
        routed = [await picker.route(BUFFERED, prompt(f"{kind} {n}")) for n in range(5)]
        assert {r.destinations[0] for r in routed} == {str(idle.address)}
    finally:
        for name, (_, backend) in mixed.items():
            backend.page = PAGES[name]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "once upon a time " * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "tell me a story " * 100}]}),
    ],
    ids=["completions", "chat"],
)
async def test_row_09_completions_and_chat_are_both_read(
    picker: PickerUnderTest, path: str, body: dict[str, Any]
) -> None:
    """The picker reads the prompt in both of OpenAI's text APIs: the same prompt goes to the same endpoint
    again.
    """
    for n, home in enumerate(picker.endpoints):
        text = json.dumps({"model": f"model-{n}", **body}).encode()
        await picker.route(BUFFERED, text, path=path, subset=[home])
        assert [(await picker.route(BUFFERED, text, path=path)).destinations[0] for _ in range(2)] == [
            home
        ] * 2
