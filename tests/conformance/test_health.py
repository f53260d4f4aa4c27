"""Rows 8 and 14 without a data plane: the names of the health service, TLS, and how the picker stops."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conformance.picker import BODY, OwnPicker, own_picker
from tests.harness.data_plane import BUFFERED, DUPLEX, DUPLEX_REQUEST, MODES, Mode, StreamExchange
from tests.harness.processes import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("both_transports")]

STATUS = health_pb2.HealthCheckResponse
READINESS = ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"]
NAMES = ["liveness", *READINESS]


class WatchedHealth:
    """The statuses that a Watch of one service has sent, the latest last."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self.seen: list[int] = []
        self.error: grpc.StatusCode | None = None
        """The error that ended the Watch. None if it is open or was stopped."""
        self._call: Any = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=service)
        )
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            async for answer in self._call:
                self.seen.append(answer.status)
        except grpc.aio.AioRpcError as error:
            self.error = error.code()

    async def wait(self, *expected: int) -> None:
        wanted = list(expected)
        await wait_until(lambda: self.seen == wanted or self._task.done(), what=f"the watch sends {expected}")
        assert self.seen == wanted, self.error

    @property
    def open(self) -> bool:
        return not self._task.done()

    async def stop(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def watching(picker: OwnPicker, *services: str) -> AsyncIterator[list[WatchedHealth]]:
    """Open a Watch of each service."""
    watches = [WatchedHealth(picker.channel, service) for service in services]
    try:
        yield watches
    finally:
        await asyncio.gather(*(watched.stop() for watched in watches))


async def test_an_unknown_service_is_called_unknown(picker: OwnPicker) -> None:
    """The picker answers SERVICE_UNKNOWN to a name that it does not have, in Check and in Watch."""
    assert await picker.health("no.such.Service") == STATUS.SERVICE_UNKNOWN
    async with watching(picker, "no.such.Service") as (watched,):
        await watched.wait(STATUS.SERVICE_UNKNOWN)


@pytest.mark.parametrize("service", NAMES)
async def test_check_and_watch_answer_at_once_under_each_name(picker: OwnPicker, service: str) -> None:
    """Kubelets ask for liveness and readiness, data planes for the service or without a name: all are
    SERVING. Watch stays open to send changes.
    """
    async with watching(picker, service) as (watched,):
        await watched.wait(STATUS.SERVING)
        assert await picker.health(service) == STATUS.SERVING
        assert watched.open


async def test_a_drain_ends_readiness_first_and_answers_until_it_ends(tmp_path: Path) -> None:
    """After SIGTERM readiness ends first and liveness stays. Streams in flight finish, and new ones are
    answered.
    """
    async with own_picker(tmp_path) as picker, watching(picker, "liveness", *READINESS) as watches:
        liveness, *readiness = watches
        for watched in watches:
            await watched.wait(STATUS.SERVING)
        async with picker.exchange() as before:
            await before.send(BODY)
            async with picker.exchange() as unanswered:
                await unanswered.begin()
                picker.process.process.signal(signal.SIGTERM)
                for watched in readiness:
                    await watched.wait(STATUS.SERVING, STATUS.NOT_SERVING)
                assert liveness.seen == [STATUS.SERVING]
                for mode in MODES.values():
                    assert (await picker.route(mode)).destinations
                assert await picker.health("liveness") == STATUS.SERVING
            await before.respond(b"{}")
            assert await before.code() is grpc.StatusCode.OK
        assert await picker.process.process.wait() == 0


async def test_a_drain_ends_streams_with_ok_after_response_headers(tmp_path: Path) -> None:
    """A stream that only waits for an answer's end is closed at once, with OK: an error would cut the answer
    if the gateway fails closed. A stream whose answer has not begun stays open until it begins. So does a
    stream through which the answer passes.
    """
    async with own_picker(tmp_path) as picker, AsyncExitStack() as stack:

        async def sent(mode: Mode) -> StreamExchange:
            exchange = await stack.enter_async_context(picker.exchange(mode))
            return await exchange.send(BODY)

        modes = (BUFFERED, DUPLEX_REQUEST)
        answered, waiting = [await sent(mode) for mode in modes], [await sent(mode) for mode in modes]
        for exchange in answered:
            await exchange.respond(b"{}")
        passing = await sent(DUPLEX)
        picker.process.process.signal(signal.SIGTERM)
        assert {await exchange.code() for exchange in answered} == {grpc.StatusCode.OK}
        assert (await picker.process.page("endpoints"))["draining"]
        assert not any(exchange.call.done() for exchange in (*waiting, passing))
        for exchange in waiting:
            await exchange.respond(b"{}")
            assert await exchange.code() is grpc.StatusCode.OK
        await passing.respond([b"first", b"second"])
        assert passing.response.body == b"firstsecond"
        assert await passing.code() is grpc.StatusCode.OK


async def test_streams_that_are_not_held_end_with_ok_after_response_headers(tmp_path: Path) -> None:
    """For gateways that fail closed the picker holds no streams open. So its death cuts no answer."""
    async with own_picker(tmp_path, envoy={"failOpen": False}) as picker:
        for mode in (BUFFERED, DUPLEX_REQUEST):
            async with picker.exchange(mode) as exchange:
                await exchange.send(BODY)
                await exchange.respond(b"{}")
                assert await exchange.code() is grpc.StatusCode.OK
        async with picker.exchange(DUPLEX) as exchange:
            await exchange.send(BODY)
            await exchange.respond([b"whole", b" answer"])
            assert exchange.response.body == b"whole answer"
            assert await exchange.code() is grpc.StatusCode.OK
