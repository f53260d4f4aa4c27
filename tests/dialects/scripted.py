"""The two gateways that are not Envoys, as far as a picker and a client see them. Each is an HTTP server that
asks the picker and proxies the request. They follow agentgateway's `ext_proc.rs` and NGINX Gateway Fabric's
`endpoint_picker.go` and `epp.js`. Both run in the test's event loop.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import grpc
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire

from epp.base.types import Address
from tests.harness import data_plane
from tests.harness.data_plane import DESTINATION, LB, Immediate
from tests.harness.listening import serving

_HOP_BY_HOP: Final = {
    "connection",
    "content-length",
    "transfer-encoding",
    "host",
    "keep-alive",
    "date",
    "server",
}


class Scripted:
    """`answer` handles one request of a client."""

    def __init__(self, picker: str, servers: Sequence[str]) -> None:
        self._picker = picker
        self._fallback = itertools.cycle(servers)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    async def close(self) -> None:
        await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    @asynccontextmanager
    async def _asked(
        self, server: str, request: web.Request, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.request(
            request.method, f"http://{server}{request.raw_path}", data=body or None, headers=headers
        ) as response:
            yield response


class AgentGateway(Scripted):
    """Sends bodies in full duplex both ways, over one connection. The header holds one socket address. The
    gateway tells the picker which server served.
    """

    def __init__(self, picker: str, servers: Sequence[str]) -> None:
        super().__init__(picker, servers)
        self._channel = grpc.aio.insecure_channel(picker)

    async def close(self) -> None:
        await self._channel.close()
        await super().close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = [(name, value) for name, value in _plain(request.headers).items()]
        async with data_plane.exchange(self._channel, mode=data_plane.DUPLEX) as exchange:
            try:
                await exchange.send(
                    body or None, method=request.method, path=request.raw_path, headers=headers
                )
            except (grpc.aio.AioRpcError, AssertionError):
                return web.Response(status=503, text="the endpoint picker failed")
            if exchange.immediate is not None:
                return _shown(exchange.immediate)
            try:
                server = str(Address.parse(exchange.destination))
            except ValueError:
                return web.Response(status=500, text="EPP returned invalid address")
            # The headers that the picker set go on. The headers that it removed do not.
            changed = _plain({name: value for name, value in exchange.request.headers if name[0] != ":"})
            try:
                async with self._asked(server, request, exchange.request.body, changed) as response:
                    return await self._through(exchange.call, request, response, server)
            except aiohttp.ClientConnectorError:
                return web.Response(status=503, text="upstream call failed")

    async def _through(
        self, call: Any, request: web.Request, response: aiohttp.ClientResponse, server: str
    ) -> web.StreamResponse:
        """Pass the answer through the picker, piece by piece."""
        message = wire.ProcessingRequest()
        part = message.response_headers
        part.headers.headers.add(key=":status", raw_value=str(response.status).encode())
        for name, value in _plain(response.headers).items():
            part.headers.headers.add(key=name.lower(), raw_value=value.encode())
        message.metadata_context.filter_metadata[LB].update({f"{DESTINATION}-served": server})
        await call.write(message)
        assert (await call.read()).HasField("response_headers")
        answer = web.StreamResponse(status=response.status, headers=_plain(response.headers))
        await answer.prepare(request)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(call, response))
            ended = False
            while not ended:  # the picker may cut the body into other pieces
                streamed = (await call.read()).response_body.response.body_mutation.streamed_response
                await answer.write(streamed.body)
                ended = streamed.end_of_stream
        await answer.write_eof()
        await call.done_writing()
        return answer

    async def _send(self, call: Any, response: aiohttp.ClientResponse) -> None:
        async for piece in response.content.iter_any():
            await call.write(wire.ProcessingRequest(response_body={"body": piece, "end_of_stream": False}))
        await call.write(wire.ProcessingRequest(response_body={"body": b"", "end_of_stream": True}))


class NginxGatewayFabric(Scripted):
    """Opens a connection for each request, and sends plain headers, one body and a half-close. It reads
    `raw_value` of the answer, and goes on whatever the picker answers.
    """

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        server = await self._picked(request, body) or next(self._fallback)
        try:
            async with self._asked(server, request, body, _plain(request.headers)) as response:
                answer = web.StreamResponse(status=response.status, headers=_plain(response.headers))
                await answer.prepare(request)
                async for piece in response.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except aiohttp.ClientConnectorError:
            return web.Response(status=502, text="Bad Gateway")

    async def _picked(self, request: web.Request, body: bytes) -> str:
        """Return the pick. If it is empty, the request goes to the pool's servers by turns, even if the
        picker refused the request.
        """
        options = (("grpc.use_local_subchannel_pool", 1),)
        try:
            async with (
                grpc.aio.insecure_channel(self._picker, options=options) as channel,
                data_plane.exchange(channel, mode=data_plane.BARE) as exchange,
            ):
                await exchange.send(body or None, headers=list(_plain(request.headers).items()))
                return "" if exchange.immediate else exchange.destination
        except (grpc.aio.AioRpcError, AssertionError):
            return ""


@asynccontextmanager
async def running_scripted(gateway: Scripted, *, port: int) -> AsyncIterator[str]:
    """Run the gateway and return its URL."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", gateway.answer)
    try:
        async with serving(app, port=port):
            yield f"http://127.0.0.1:{port}"
    finally:
        await gateway.close()


def _plain(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those that belong to one connection, and without the destination that a
    client names.
    """
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in _HOP_BY_HOP and name.lower() != DESTINATION
    }


def _shown(immediate: Immediate) -> web.Response:
    return web.Response(status=immediate.status, headers=immediate.headers, body=immediate.body)
