"""Calls whose handler fails, on both transports."""

import time
from collections.abc import Callable, Mapping

import grpc
import pytest

from epp.config.sections import Listen
from epp.protocol.calls import Handler, Service
from epp.transport.http2.frames import Limits
from epp.transport.http2_server import Http2Server
from epp.transport.over_grpcio import GrpcioTransport

METHOD = "/a.Service/Fails"


class Failing(Handler):
    def __init__(self, gone: list[bool]) -> None:
        self._gone = gone

    def message(self, data: bytes, *, now: float) -> None:
        raise ZeroDivisionError

    def gone(self, *, now: float, broken: bool) -> None:
        self._gone.append(broken)


def over_http2(services: Mapping[str, Service]) -> Http2Server:
    limits = Limits(max_message_bytes=1000)
    return Http2Server(
        services, limits=limits, max_held_bytes=1000, max_peers=9, clock=time.monotonic, on_fault=print
    )


def over_grpcio(services: Mapping[str, Service]) -> GrpcioTransport:
    return GrpcioTransport(services, max_message_bytes=1000, clock=time.monotonic)


@pytest.mark.parametrize("over", [over_http2, over_grpcio])
async def test_a_call_whose_handler_fails_ends_with_unknown_and_is_logged(
    over: Callable[[Mapping[str, Service]], Http2Server | GrpcioTransport], caplog: pytest.LogCaptureFixture
) -> None:
    gone: list[bool] = []
    transport = over({METHOD: lambda _: Failing(gone)})
    port = await transport.start(Listen(address="127.0.0.1:0"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        await call.write(b"any")
        assert (await call.code(), await call.details()) == (grpc.StatusCode.UNKNOWN, "the service failed")
    await transport.stop(0.0)
    assert gone == [True]
    assert "a call failed" in caplog.text
