"""The data plane's side of ext_proc: it carries out a picker's answers, and fails where no data plane could
use them.
"""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire

from epp.tools.conformance.dataplane import BARE, BUFFERED, DESTINATION, DUPLEX, exchange
from tests.unit.tools.conformance.scripted_picker import buffered, named, plain, refusing, scripted


async def test_the_destinations_are_those_of_the_header_and_of_the_metadata() -> None:
    async with scripted(buffered(named("10.0.0.1:80, 10.0.0.2:80"))) as channel, exchange(channel) as asked:
        await asked.send(b"{}")
        assert asked.destinations == ["10.0.0.1:80", "10.0.0.2:80"]
        assert asked.metadata_destination == asked.destination
        assert asked.carriers == 1
        assert asked.request.order == ["headers", "body"]


async def test_headers_are_removed_replaced_and_added_as_the_picker_says() -> None:
    head = named("10.0.0.1:80")
    mutation = head.request_headers.response.header_mutation
    mutation.remove_headers.append("X-Gone")
    for name, value, append in (("X-Old", "new", False), ("x-more", "2", True)):
        option = mutation.set_headers.add()
        option.header.key, option.header.value, option.append.value = name, value, append
    async with scripted(buffered(head)) as channel, exchange(channel) as asked:
        await asked.send(b"{}", headers=[("x-gone", "1"), ("x-old", "1"), ("X-More", "1"), ("x-old", "2")])
        assert asked.request.values("x-gone") == []
        assert asked.request.values("x-old") == ["new"]
        assert asked.request.values("x-more") == ["1", "2"]


async def test_client_that_is_answered_by_picker_gets_status_headers_and_body() -> None:
    head = refusing(503, b"{}", retry="5")
    async with scripted(buffered(head)) as channel, exchange(channel) as asked:
        await asked.send(b"{}")
        refused = asked.refused
        assert (refused.status, refused.headers, refused.body) == (503, {"retry": "5"}, b"{}")
        with pytest.raises(AssertionError, match="immediate"):
            _ = asked.destination
        with pytest.raises(AssertionError, match="no server was asked"):
            await asked.respond(b"")


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([None], "the picker ended the stream: StatusCode.OK"),
        ([plain("response_headers")], "response_headers out of turn"),
        ([plain("response_body")], "response_body out of turn"),
    ],
)
async def test_an_answer_that_no_data_plane_waits_for_is_a_fault(answers: list[Any], fault: str) -> None:
    async with scripted(lambda _: answers) as channel, exchange(channel) as asked:
        with pytest.raises(AssertionError, match=fault):
            await asked.send(b"{}")


async def test_body_must_be_sent_back_in_full_duplex_and_must_not_in_other_modes() -> None:
    back = wire.ProcessingResponse()
    back.request_body.response.body_mutation.streamed_response.body = b"{}"
    for mode, body, fault in (
        (BUFFERED, back, "only full duplex takes a streamed body"),
        (DUPLEX, plain("request_body"), "the body has to be sent back"),
    ):

        def script(request: Any, body: Any = body) -> list[Any]:
            return [named("10.0.0.1:80")] if request.WhichOneof("request") == "request_headers" else [body]

        async with scripted(script) as channel, exchange(channel, mode=mode) as asked:
            with pytest.raises(AssertionError, match=fault):
                await asked.send(b"{}")


async def test_a_picker_that_does_not_answer_is_a_timeout() -> None:
    async with scripted(lambda _: []) as channel, exchange(channel, patience_s=0.05) as asked:
        with pytest.raises(TimeoutError):
            await asked.send(b"{}")


async def test_the_modes_are_stated_once_and_the_subset_hint_is_sent() -> None:
    seen: list[Any] = []

    def script(request: Any) -> list[Any]:
        seen.append(request)
        return list(buffered(named("10.0.0.1:80"))(request))

    async with scripted(script) as channel, exchange(channel) as asked:
        await asked.send(b"{}", subset=["10.0.0.1:80"])
        await asked.respond(None, served="10.0.0.1:80")
    first, *others = seen
    assert first.protocol_config.request_body_mode == BUFFERED.request
    assert not any(message.HasField("protocol_config") for message in others)
    hint = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    assert list(hint[f"{DESTINATION}-subset"]) == ["10.0.0.1:80"]
    served = others[-1].metadata_context.filter_metadata["envoy.lb"]
    assert served[f"{DESTINATION}-served"] == "10.0.0.1:80"


async def test_a_data_plane_that_only_asks_reads_until_the_end() -> None:
    seen: list[str] = []

    def script(request: Any) -> list[Any]:
        if request.WhichOneof("request") == "request_body":
            return [named("10.0.0.1:80", metadata=False), None]
        seen.extend(header.key for header in request.request_headers.headers.headers)
        return []

    async with scripted(script) as channel, exchange(channel, mode=BARE) as asked:
        await asked.send(b"{}", headers=[("x-mine", "1")])
        assert asked.destinations == ["10.0.0.1:80"]
    assert seen == ["x-mine", "x-epp-host", "x-epp-port"]
