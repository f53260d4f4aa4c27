"""The picker's own requests for one token, over real HTTP, to servers that work, fail or behave oddly."""

import asyncio

import pytest
from aiohttp import web

from epp.base.types import Address, Endpoint, EndpointName
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.marks import Mark, Probe, Verdict
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.sources.scraping.page_client import ApiKey
from epp.sources.scraping.probes import Probes
from tests.harness.listening import Handler, serving_path
from tests.harness.ports import free_port
from tests.harness.tasks import running_task


async def completes(request: web.Request) -> web.Response:
    assert await request.json() == {"model": "m", "prompt": "1", "max_tokens": 1, "stream": True}
    return web.json_response({"choices": [{"text": "2"}]})


def status_only(status: int) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status)

    return answer


def sends(text: str, content_type: str, encoding: str = "identity", *, status: int = 200) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        headers = {"content-type": content_type, "content-encoding": encoding}
        return web.Response(status=status, body=text.encode(), headers=headers)

    return answer


def event_stream(event: str, *, status: int = 200) -> Handler:
    return sends(f"data: {event}\n\ndata: [DONE]\n\n", "text/event-stream", status=status)


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Cut the connection after the headers and a part of the body."""
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport
    request.transport.abort()
    return response


async def never_ends(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65536)


async def headers_only(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.get_running_loop().create_future()
    return response


async def verdict_on(address: Address, *, about: str = "", queued: bool = False) -> Verdict:
    """Return the verdict of one probe."""
    rate = PrefillRate(ModelRate(start=1000.0))
    state = EndpointState(Endpoint(EndpointName("a"), address), rate)
    heard: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    due = [Probe(state, "m", Mark(state, about), queued=queued)]
    probes = Probes(
        due=lambda: [due.pop()] if due else [],
        on_verdict=lambda _, verdict: heard.set_result(verdict),
        key=ApiKey(""),
    )
    async with running_task(probes.run):
        verdict = await asyncio.wait_for(heard, 60)
        assert probes.counts[verdict] == sum(probes.counts.values()) == 1
        return verdict


@pytest.mark.parametrize(
    ("handler", "verdict"),
    [
        (completes, "well"), (status_only(500), "ill"), (status_only(429), "ill"), (status_only(401), "refused"), (status_only(404), "refused"),
        (event_stream('{"error": {"code": 500}}'), "ill"), (event_stream('{"error": {"code": 400}}'), "refused"),
        (event_stream('{"choices": []}'), "ill"), (event_stream('{"choices": [{"text": "2"}]}'), "well"),
        (event_stream('{"choices": [{"text": "2"}]}', status=201), "well"), (status_only(204), "ill"),
        (status_only(200), "ill"), (sends("<html></html>", "text/html"), "ill"), (sends('{"choices": [{"text": "2"}]}', "application/json", "zstd"), "well"),
        (sends('data: {"choices": [{"text": "2"}]}\n\n', "text/plain; charset=utf-8"), "well"),
        (sends('data: {"choices": [{"text": "2"}]}\n\n', ""), "well"),
        (sends('data: {"error": {"code": 500}}\n\n', "text/plain"), "ill"),
        (sends('{"text": "2"}\n', "application/x-ndjson"), "unclear"), (sends("2", "text/plain"), "unclear"),
        (sends("", "application/json"), "ill"), (sends("", "text/event-stream"), "ill"),
        (breaks_off, "ill"), (status_only(302), "refused"), (never_ends, "unclear"), (headers_only, "ill"),
    ],
)  # fmt: skip
async def test_the_verdict_follows_from_the_servers_answer(handler: Handler, verdict: Verdict) -> None:
    async with serving_path("/v1/completions", handler) as address:
        assert await verdict_on(address) == verdict


async def test_a_404_is_a_failure_of_a_server_that_is_suspected_for_the_model() -> None:
    async with serving_path("/v1/completions", status_only(404)) as address:
        assert await verdict_on(address, about="m") == "ill"


async def test_a_late_answer_proves_nothing_if_other_requests_wait() -> None:
    async with serving_path("/v1/completions", headers_only) as address:
        assert await verdict_on(address, queued=True) == "unclear"
    async with serving_path("/v1/completions", status_only(500)) as address:
        assert await verdict_on(address, queued=True) == "ill"


async def test_a_server_that_refuses_connections_gets_the_verdict_unclear() -> None:
    assert await verdict_on(Address("127.0.0.1", free_port())) == "unclear"
