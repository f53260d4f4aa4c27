"""A model server that behaves as a test says: it answers with its own name, streams, waits, fails, resets,
hangs.

It runs in the test's event loop and records what it receives. Its `/metrics` page has vLLM's names with
values that a test sets. A pause is a `Gate` that the test opens, so that tests wait for events and not for
time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from aiohttp import web

from epp.base.types import Address
from tests.harness.client import SERVED_BY
from tests.harness.listening import WebServer
from tests.harness.ports import free_port
from tests.harness.processes import wait_until

METRICS: Final = {
    "vllm:num_requests_running": 0.0,
    "vllm:num_requests_waiting": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
    "vllm:prompt_tokens_total": 0.0,
    "vllm:prompt_tokens_cached_total": 0.0,
}

PICKER: Final = "prefix-gateway-epp"
"""The user agent of the requests that a picker itself sends."""

GENERATED: Final = "vllm:generation_tokens_total"
"""A metric that grows with each answer, if a test has given it to the backend."""

MetricsPage = Literal["normal", "hang", "garbage"]


class Gate:
    """A shut gate holds everything that passes it. An open gate holds nothing."""

    def __init__(self, *, shut: bool = False) -> None:
        self._open = asyncio.Event()
        self.waiting = 0
        if not shut:
            self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1

    async def wait_waiting(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Wait until the gate holds exactly `count`."""
        await wait_until(lambda: self.waiting == count, what=f"{count} held at the gate", timeout_s=timeout_s)


@dataclass(slots=True)
class Received:
    """One request as the backend saw it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    target: str = ""
    """The path and query as they were sent."""
    finished: bool = False
    """True when the whole answer was written. It stays False if the client went away."""


@dataclass(slots=True)
class Behaviour:
    """How the backend answers from now on."""

    status: int = 200
    chunks: int = 1
    """Pieces of the body. With more than one piece, or with `stream` in the request, the answer is
    server-sent events.
    """
    before_headers: Gate = field(default_factory=Gate)
    before_body: Gate = field(default_factory=Gate)
    before_last: Gate = field(default_factory=Gate)
    """The gate before the last piece. While it is shut, an answer is in flight."""
    headers_pause_s: float = 0.0
    chunk_pause_s: float = 0.0
    reset: bool = False
    """Cut the connection after the request was read, without an answer."""
    dies_of: bytes = b""
    """A request whose body has these bytes ends the server. Empty: none does."""
    cuts: Literal["", "chunked", "length"] = ""
    """Cut the connection after the headers and a part of the body. The body is chunked or has a stated
    length.
    """
    fail_next: int = 0
    """The number of coming requests that get `fail_status`."""
    fail_status: int = 503
    longest_bytes: int = 2**40
    """A longer body gets 400, as a prompt that is too long for the model."""
    fails_midway_with: int = 0
    """Streamed answers begin with 200, tell of an error with this code, and end."""


class Backend:
    """One scriptable model server. Made by `running_backend`. A test can stop it and start it again on the
    same port.
    """

    def __init__(self, name: str, *, address: Address) -> None:
        self.name = name
        self.address = address
        self.behaviour = Behaviour()
        self.received: list[Received] = []
        self.metrics: dict[str, float] = dict(METRICS)
        self.metrics_page: MetricsPage = "normal"
        self.models: list[dict[str, object]] = []
        """The models that pickers get when they ask. Empty: the backend does not list its models."""
        self.more_metrics = ""
        """Further lines of the normal page."""
        self._server: WebServer | None = None
        self._death: asyncio.Task[None] | None = None

    @property
    def prompts(self) -> list[Received]:
        """Return the requests of clients, without scrapes and probes."""
        return [r for r in self.received if r.path != "/metrics" and r.headers.get("user-agent") != PICKER]

    @property
    def probes(self) -> int:
        """Return how often a picker itself has asked for a token."""
        return sum(r.method == "POST" and r.headers.get("user-agent") == PICKER for r in self.received)

    async def start(self) -> None:
        assert self._server is None
        app = web.Application(client_max_size=2**31)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/ws", self._websocket)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = WebServer(app)
        await self._server.listen(self.address.host, self.address.port)

    @property
    def alive(self) -> bool:
        return self._server is not None

    async def stop(self) -> None:
        """Act as a killed server: cut the connections and close the port."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models" and request.headers.get("user-agent") == PICKER:
            return web.json_response(
                {"object": "list", "data": self.models}, status=200 if self.models else 404
            )
        received = Received(
            request.method,
            request.path,
            request.headers.copy(),
            await request.read(),
            target=request.raw_path,
        )
        self.received.append(received)
        behaviour = self.behaviour
        await behaviour.before_headers.passed()
        if behaviour.headers_pause_s:
            await asyncio.sleep(behaviour.headers_pause_s)
        headers = {SERVED_BY: self.name}
        if behaviour.dies_of and behaviour.dies_of in received.body:
            self._death = asyncio.create_task(self.stop())
            await asyncio.Event().wait()
        if behaviour.reset:
            assert request.transport
            request.transport.abort()
            return web.Response()
        if len(received.body) > behaviour.longest_bytes:
            return web.json_response({"error": {"message": "too long"}}, status=400, headers=headers)
        if behaviour.fail_next > 0:
            behaviour.fail_next -= 1
            return web.Response(status=behaviour.fail_status, headers=headers, text="failing as told")
        if behaviour.cuts:
            return await self._cut(request, behaviour.cuts)
        if behaviour.chunks == 1 and not _wants_stream(received.body):
            await behaviour.before_body.passed()
            await behaviour.before_last.passed()
            self._finished(received)
            answer = {
                "choices": [{"text": f"from {self.name}"}],
                "object": "text_completion",
            }
            return web.json_response(answer, status=behaviour.status, headers=headers)
        return await self._stream(request, received, behaviour)

    def _finished(self, received: Received) -> None:
        received.finished = True
        if GENERATED in self.metrics:
            self.metrics[GENERATED] += 1

    async def _stream(
        self, request: web.Request, received: Received, behaviour: Behaviour
    ) -> web.StreamResponse:
        headers = {SERVED_BY: self.name, "content-type": "text/event-stream"}
        response = web.StreamResponse(status=behaviour.status, headers=headers)
        await response.prepare(request)
        await behaviour.before_body.passed()
        if behaviour.fails_midway_with:
            error = {"error": {"message": "as the test says", "code": behaviour.fails_midway_with}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
            return response
        for index in range(behaviour.chunks):
            if index == behaviour.chunks - 1:
                await behaviour.before_last.passed()
            event = {"choices": [{"text": f"{self.name}-{index} "}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if behaviour.chunk_pause_s:
                await asyncio.sleep(behaviour.chunk_pause_s)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        self._finished(received)
        return response

    async def _cut(self, request: web.Request, form: str) -> web.StreamResponse:
        length = {"content-length": "1000"} if form == "length" else {}
        response = web.StreamResponse(headers={SERVED_BY: self.name, **length})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        await asyncio.sleep(0.02)
        if request.transport:
            request.transport.abort()
        return response

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        self.received.append(Received("GET", request.path, request.headers.copy(), b""))
        socket = web.WebSocketResponse()
        socket.headers[SERVED_BY] = self.name
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(f"{self.name}: {message.data}")
        return socket

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.received.append(Received("GET", "/metrics", request.headers.copy(), b""))
        if self.metrics_page == "hang":
            await asyncio.Event().wait()
        if self.metrics_page == "garbage":
            return web.Response(body=b"\xff\xfe{]vllm:num_requests_running NaNaN\n" * 100)
        lines = [f'{name}{{model_name="m",engine="0"}} {value}' for name, value in self.metrics.items()]
        return web.Response(text="\n".join(lines) + "\n" + self.more_metrics)


def _wants_stream(body: bytes) -> bool:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("stream") is True


@asynccontextmanager
async def running_backend(
    name: str, *, port: int | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Backend]:
    backend = Backend(name, address=Address(host=host, port=port or free_port(host=host)))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


@asynccontextmanager
async def running_backends(count: int) -> AsyncIterator[list[Backend]]:
    """Run `count` backends named s0, s1, ..."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_backend(f"s{n}")) for n in range(count)]
