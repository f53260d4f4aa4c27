"""The demo's parts: its workload, its users and the servers' counters. tests/integration/test_demo.py has the
rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from bench.demo.counters import read_counters
from bench.demo.load import Run, drive
from bench.demo.serving import made_up
from bench.demo.workload import Shape, make_workload
from tests.harness.listening import serving

DEMO = Shape.of(servers=4, requests=264)
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":" one"}}]}\n\n'
    b': a comment\n\ndata: {"choices":[{"delta":{"content":" two"},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{}}\n\n'
)
DONE = b"data: [DONE]\n\n"
PAGE = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 40.0
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
vllm:request_success_total{finished_reason="stop"} 2.0
vllm:request_success_total{finished_reason="length"} 3.0
"""


def test_turn_sends_conversation_so_far_after_its_tenants_system_prompt() -> None:
    workload = make_workload(DEMO, seed=1)
    user = workload.users[3]
    first, second = next(c for c in user.conversations if len(c) > 1)[:2]
    before = workload.body(user, [], first, nonce="abc")
    after = workload.body(user, [(first.message, "an answer")], second, nonce="abc")
    assert after["messages"][: len(before["messages"])] == before["messages"]
    assert [m["role"] for m in after["messages"]] == ["system", "user", "assistant", "user"]
    assert workload.systems[user.tenant] in after["messages"][0]["content"]
    assert after["cache_salt"] == f"tenant-{user.tenant}"


def test_the_prefixes_in_use_fit_four_caches_but_not_two() -> None:
    cache = made_up().cache_tokens

    live = make_workload(DEMO, seed=1).live_prefix_tokens
    assert 2 * cache < live < 4 * cache


@asynccontextmanager
async def gateway_answering(body: bytes, *, status: int = 200) -> AsyncIterator[str]:
    """A gateway that gives every request the same answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(status=status, headers={"x-request-id": "r-1"})
        await response.prepare(request)
        await response.write(body)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with serving(app) as port:
        yield f"http://127.0.0.1:{port}"


async def test_each_users_first_request_is_not_timed() -> None:
    shape = Shape(
        users=3, tenants=2, requests_per_user=3, system_words=5, think_s=(0.0, 0.0), arrivals_per_s=1e6
    )
    workload = make_workload(shape, seed=1)
    good, failing = Run(total=9, started_at=0.0), Run(total=9, started_at=0.0)
    async with aiohttp.ClientSession() as session:
        async with gateway_answering(EVENTS + DONE) as url:
            await drive(workload, good, url=url, nonce="n", session=session)
        async with gateway_answering(b"no", status=500) as url:
            await drive(workload, failing, url=url, nonce="n", session=session)
    assert (good.sent, good.done, len(good.ttfts_s), good.failures) == (9, 9, 6, [])
    assert good.last_request_id == "r-1"
    assert (failing.done, len(failing.failures), failing.ttfts_s) == (9, 9, [])


def test_a_page_without_a_counter_is_refused_rather_than_read_as_zero() -> None:
    with pytest.raises(ValueError, match="prefix_cache_hits"):
        read_counters(PAGE.replace("vllm:prefix_cache_hits_total", "vllm:other_total"))
