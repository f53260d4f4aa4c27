"""The model server over HTTP: which requests it refuses, and what happens when something breaks."""

import asyncio
import json
import resource
import zlib
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from model_server.core.engine import Engine, StepResult
from model_server.core.kv_cache import Unobserved
from model_server.core.scheduler import SchedulerLimits, StepPlan
from model_server.server.serve import Server, listening
from tests.harness.http_model_server import NEVER_ENDING, HttpModelServer, Start, quick, until

SAID = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", b"{", None),
        ("completions", b"\xff\xfe", None),
        ("completions", b"[" * 100_000, None),
        ("completions", b'{"prompt": "\\ud800"}', None),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, -2]}, "prompt[1]"),
        ("completions", {"prompt": [1, "x"]}, "prompt[1]"),
        ("completions", {"prompt": [True]}, "prompt[0]"),
        ("completions", {"prompt": ["x"] * 200, "n": 2}, "n"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "x", "logprobs": 0}, "logprobs"),
        ("completions", {"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ("completions", {"prompt": "x", "stop": "a" * 257}, "stop"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream_options"),
        ("completions", {"prompt": "word " * 5000}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": 5000}, "prompt"),
        ("chat/completions", {"messages": SAID, "logprobs": True}, "logprobs"),
        ("chat/completions", {"messages": SAID, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "a|>", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [SAID[0] | {"content": [{"type": "image_url"}]}]}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [SAID[0] | {"content": "x" * 200_000}]}, "prompt"),
    ],
)
async def test_bad_input_gets_400_in_the_apis_shape(
    start: Start, path: str, body: Any, param: str | None
) -> None:
    """`test_vllm_api_contract` has more bad input, which vLLM refuses too."""
    server = await start(max_model_len_tokens=4096)
    status, answer = await server.post(f"/v1/{path}", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert answer["error"]["message"]
    assert server.engine.num_unfinished == 0


async def test_an_unknown_model_and_an_unknown_path_get_404(start: Start) -> None:
    server = await start()
    status, answer = await server.post("/v1/completions", {"prompt": "x", "model": "nope"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = await server.post("/v1/nope", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    async with server.http.get("/v1/completions") as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"


async def test_while_draining_the_server_is_unhealthy_and_refuses_work(start: Start) -> None:
    server = await start()
    server.server.driver.draining = True
    async with server.http.get("/health") as response:
        assert response.status == 503
    status, answer = await server.post("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["type"]) == (503, "service_unavailable")


async def test_a_full_queue_answers_429(start: Start) -> None:
    server = await start(costs=NEVER_ENDING, limits=SchedulerLimits(max_num_seqs=1), max_waiting=1)
    posts = []
    for number in (1, 2):
        posts.append(asyncio.create_task(server.post("/v1/completions", {"prompt": "x"})))
        await until(lambda number=number: server.engine.num_unfinished == number)  # type: ignore[misc]  # a lambda with a default
        await until(lambda: len(server.engine.scheduler.running) == 1)
    async with server.http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status == 429
        assert response.headers["retry-after"] == "1"
        assert (await response.json())["error"]["type"] == "rate_limit_exceeded"
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)


async def test_a_body_over_the_limit_gets_413_in_the_apis_shape(start: Start) -> None:
    server = await start(max_body_bytes=2000)
    assert (await server.post("/v1/completions", {"prompt": "x" * 1900}))[0] == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        status, answer = await server.post(path, {"prompt": "x" * 2000})
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        assert "2,000 bytes" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "GZIP"])
async def test_a_compressed_body_gets_400_as_from_vllm_and_is_never_unpacked(
    start: Start, coding: str, path: str
) -> None:
    server = await start()
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()
    headers = {"content-encoding": coding, "content-type": "application/json"}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with server.http.post(path, data=bomb, headers=headers) as response:
        assert response.status == 400
        assert f"content-encoding {coding}" in (await response.json())["error"]["message"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


async def test_connection_that_breaks_between_two_writes_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = quick()
    server = Server(settings)
    open_transports: list[asyncio.WriteTransport] = []
    broken: list[asyncio.WriteTransport] = []

    async def note(request: web.Request, _: web.StreamResponse) -> None:
        assert isinstance(request.transport, asyncio.WriteTransport)
        open_transports.append(request.transport)

    def break_it() -> None:
        """The connection is closing and not yet closed. The handler is not told, and its next write fails."""
        while open_transports:
            transport = open_transports.pop()
            transport.write(bytes(64 * 1024 * 1024))
            transport.close()
            broken.append(transport)

    server.application.on_response_prepare.append(note)
    server.driver.publish_events = break_it
    body = json.dumps({"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}).encode()
    async with listening(server, settings) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: bool(broken) and server.engine.num_unfinished == 0)
        for transport in (*broken, writer.transport):
            transport.abort()
        await writer.wait_closed()
    assert len(broken) == 1
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    server.engine.check_integrity()


async def test_a_far_too_long_text_is_refused_without_being_cut_into_tokens(start: Start) -> None:
    server = await start(max_model_len_tokens=100)
    text = "x " * 50_000
    status, answer = await server.post("/v1/completions", {"prompt": [text]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "100000 characters" in answer["error"]["message"]
    _, tokens = await server.post("/tokenize", {"prompt": text})
    assert tokens["count"] > 100  # the server may count requests of that page


async def test_unexpected_fault_is_500_in_the_apis_shape_and_a_traceback_in_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start()
    server.engine.kv_cache.observer = Broken()
    status, answer = await server.post("/reset_prefix_cache", b"")
    assert status == 500
    assert answer["error"]["type"] == "internal_server_error"
    assert "broken on purpose" not in json.dumps(answer)
    assert "broken on purpose" in caplog.text


class Broken(Unobserved):
    def cleared(self) -> None:
        raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    ("sent", "kept"), [("my-id", True), ("two words", False), ("é", False), ("x" * 500, False)]
)
async def test_the_request_id_is_the_clients_where_it_sent_a_usable_one(
    start: Start, sent: str, *, kept: bool
) -> None:
    server = await start()
    headers = {"x-request-id": sent}
    async with server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        reply_id = response.headers["x-request-id"]
        assert (reply_id == sent) == kept
        assert (await response.json())["id"] == f"cmpl-{reply_id}"


class BreakingRunner:
    """Works until there are two requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._working = engine.runner

    def execute(self, plan: StepPlan) -> StepResult:
        if self._engine.num_unfinished == 2:
            raise RuntimeError("out of memory")
        return self._working.execute(plan)


async def test_a_fault_of_the_engine_ends_the_server_and_every_request() -> None:
    settings = quick(drain_timeout_s=30.0)
    server = Server(settings)
    server.engine.runner = BreakingRunner(server.engine)

    async def two_requests() -> None:
        body = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}
        async with (
            listening(server, settings) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            running = HttpModelServer(http, server)
            streamed = asyncio.create_task(running.events("/v1/completions", body))
            await until(lambda: server.engine.num_unfinished == 1)
            whole = asyncio.create_task(running.post("/v1/completions", body))
            try:
                await asyncio.Event().wait()
            finally:
                status, answer = await whole
                assert (status, answer["error"]["code"]) == (500, "engine_stopped")
                assert (await streamed)[-1]["error"]["code"] == "engine_stopped"

    with pytest.raises(ExceptionGroup) as ended:
        await two_requests()
    assert [str(error) for error in ended.value.exceptions] == ["out of memory"]
