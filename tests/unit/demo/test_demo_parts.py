"""The demo's parts: its workload, its users, the servers' counters and the table of figures.
tests/integration/test_demo.py has the rest.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from bench.demo.counters import ServerCounters, read_counters
from bench.demo.load import Run, drive
from bench.demo.report import RuleFigures, table
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


def test_counters_are_summed_over_labels() -> None:
    counters = read_counters(PAGE)
    assert (counters.queried_tokens, counters.hit_tokens, counters.finished) == (100, 40, 5)
    later = read_counters(PAGE.replace("100.0", "110.0").replace("40.0", "70.0").replace("3.0", "7.0"))
    assert later.since(counters) == ServerCounters(10, 30, 4)


def test_the_table_has_each_figure_and_its_ratio_to_the_first_rule() -> None:
    first = RuleFigures(
        rule="round-robin",
        requests=100,
        failed=0,
        failures=(),
        duration_s=20.0,
        queried_tokens=1000,
        hit_tokens=400,
        ttfts_s=(0.4, 0.1, 0.3, 0.2),
        requests_by_server=(50, 50),
        picker_cpu_s=0.5,
        picker_idle_cpu_s=0.2,
    )
    better = replace(first, hit_tokens=800, ttfts_s=(0.05, 0.1), failed=10, picker_cpu_s=0.8)
    lines = table([first, replace(better, rule="least-cost", requests_by_server=(1060, 40))]).splitlines()
    assert [re.split(" {2,}", line.strip()) for line in (lines[0], *lines[2:])] == [
        ["round-robin", "least-cost", "ratio"],
        ["token hit rate", "40.0 %", "80.0 %", "2.00x"],
        ["prompt tokens computed", "600", "200", "0.33x"],
        ["TTFT p50", "200 ms", "50 ms", "0.25x"],
        ["TTFT p90", "400 ms", "100 ms", "0.25x"],
        ["requests/s", "5.00 /s", "4.50 /s", "0.90x"],
        ["failed requests", "0", "10"],
        ["picker CPU per request", "3.00 ms", "6.00 ms", "2.00x"],
        ["requests by server", "s1", "50", "1,060"],
        ["s2", "50", "40"],
    ]
