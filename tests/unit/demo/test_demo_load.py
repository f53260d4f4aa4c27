"""The demo's users and counters, and how progress is shown."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from bench.demo.counters import read_counters
from bench.demo.demo import Progress
from bench.demo.load import Run, drive
from bench.demo.workload import Shape, make_workload
from tests.harness.listening import serving

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


def test_counters_are_summed_over_labels() -> None:
    counters = read_counters(PAGE)
    assert (counters.queried_tokens, counters.hit_tokens, counters.finished) == (100, 40, 5)
    later = read_counters(PAGE.replace("40.0", "70.0"))
    assert later.since(counters).hit_tokens == 30


def test_a_page_without_a_counter_is_refused_rather_than_read_as_zero() -> None:
    with pytest.raises(ValueError, match="prefix_cache_hits"):
        read_counters(PAGE.replace("vllm:prefix_cache_hits_total", "vllm:other_total"))


def test_progress_is_printed_as_whole_lines_outside_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show("least-cost", Run(total=4, started_at=0.0, sent=3, done=2, ttfts_s=[0.1]), now=7.4)
    progress.close()
    text = stream.getvalue()
    assert text.endswith("\n")
    assert "\r" not in text
    assert "2/4" in text
