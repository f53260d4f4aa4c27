"""The target sends requests to a picker in the way of each gateway."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from epp.config.dialects import DIALECTS, DialectName
from epp.tools.conformance.target import MODES, SENDS_SUBSETS, PickerUnderTest
from tests.unit.tools.conformance.scripted_picker import Script, buffered, named, refusing, scripted

HERE = "10.0.0.1:80"


def test_every_gateway_has_its_body_mode() -> None:
    assert set(MODES) == set(DIALECTS)
    assert set(DIALECTS) >= SENDS_SUBSETS


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_gateway_reads_a_list_or_one_address_as_its_dialect_says(dialect: DialectName) -> None:
    nobody: Any = None
    target = PickerUnderTest(nobody, dialect, [HERE])
    assert target.mode is MODES[dialect]
    assert target.reads_list is DIALECTS[dialect].reads_list


async def test_a_routed_request_is_answered_by_its_server() -> None:
    seen: list[str] = []

    def script(request: Any) -> list[Any]:
        seen.append(request.WhichOneof("request"))
        return list(buffered(named(HERE))(request))

    async with scripted(script) as channel:
        routed = await PickerUnderTest(channel, "envoy", [HERE]).route(b"{}")
        assert routed.destinations == [HERE]
        assert seen == ["request_headers", "request_body", "response_headers"]
        await PickerUnderTest(channel, "envoy", [HERE]).route(b"{}", answered=False)
        assert seen[3:] == ["request_headers", "request_body"]


async def test_a_request_that_the_picker_refuses_reaches_no_server() -> None:
    async with scripted(buffered(refusing(429))) as channel:
        routed = await PickerUnderTest(channel, "envoy", [HERE]).route(b"{}")
        assert routed.refused.status == 429
        assert routed.response.headers == []


async def test_a_stream_that_ends_with_an_error_is_a_fault() -> None:
    def broken(request: Any) -> list[Any]:
        if request.WhichOneof("request") == "response_headers":
            raise ZeroDivisionError
        return list(buffered(named(HERE))(request))

    script: Script = broken
    async with scripted(script) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="ZeroDivisionError"):
            await PickerUnderTest(channel, "envoy", [HERE]).route(b"{}")


async def test_health_is_asked_by_the_name_of_the_service() -> None:
    async with scripted(lambda _: []) as channel:
        target = PickerUnderTest(channel, "envoy", [HERE])
        assert await target.health("") == health_pb2.HealthCheckResponse.SERVING
        assert await target.health("other") == health_pb2.HealthCheckResponse.NOT_SERVING
