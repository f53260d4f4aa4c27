"""A picker with one fault, to check that the suite notices the fault. It is our own picker behind a proxy
that changes messages. Each fault changes the requests, the answers or the health service as pickers really go
wrong. Only `test_suite` uses this module.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.tools.conformance.dataplane import DESTINATION, LB, METHOD, SUBSET_HINT
from tests.conformance.picker import PickerUnderTest
from tests.harness.ports import free_port

_APPEND = base_pb2.HeaderValueOption.HeaderAppendAction.APPEND_IF_EXISTS_OR_ADD


def _as_it_is(message: Any) -> Any:
    return message


@dataclass(frozen=True, slots=True)
class Fault:
    request: Callable[[Any], Any] = _as_it_is
    answer: Callable[[Any], Any] = _as_it_is
    end: grpc.StatusCode = grpc.StatusCode.OK
    healthy: bool = True
    """True: the health service is the picker's own. False: the health service knows no names and cannot
    watch.
    """


def _mutation(answer: Any) -> Any:
    """Return the header mutation of any answer. None if the answer cannot have one."""
    kind = answer.WhichOneof("response")
    part = getattr(answer, kind)
    return part.response.header_mutation if hasattr(part, "response") else None


def _streamed(answer: Any, direction: str) -> Any:
    """Return the echoed piece in an answer, or None if the answer holds none."""
    if answer.WhichOneof("response") != f"{direction}_body":
        return None
    mutation = getattr(answer, f"{direction}_body").response.body_mutation
    return mutation.streamed_response if mutation.HasField("streamed_response") else None


def _each_destination(answer: Any, change: Callable[[str], str], *, header: bool, metadata: bool) -> Any:
    mutation = _mutation(answer)
    for option in mutation.set_headers if mutation is not None and header else ():
        if option.header.key == DESTINATION:
            option.header.raw_value = change(option.header.raw_value.decode()).encode()
    if metadata and answer.HasField("dynamic_metadata"):
        fields = answer.dynamic_metadata.fields[LB].struct_value.fields
        fields[DESTINATION].string_value = change(fields[DESTINATION].string_value)
    return answer


def _no_metadata(answer: Any) -> Any:
    answer.ClearField("dynamic_metadata")
    return answer


def _one_destination(answer: Any) -> Any:
    return _each_destination(answer, lambda text: text.partition(",")[0], header=True, metadata=True)


def _twice_the_same(answer: Any) -> Any:
    def twice(text: str) -> str:
        return ",".join([text.partition(",")[0]] * 2)

    return _each_destination(answer, twice, header=True, metadata=True)


def _other_metadata(answer: Any) -> Any:
    def backwards(text: str) -> str:
        return ",".join(reversed(text.split(",")))

    return _each_destination(answer, backwards, header=False, metadata=True)


def _no_brackets(answer: Any) -> Any:
    def bare(text: str) -> str:
        return text.replace("[", "").replace("]", "")

    return _each_destination(answer, bare, header=True, metadata=True)


def _appended(answer: Any) -> Any:
    """The destination that the client sent stays beside the pick."""
    mutation = _mutation(answer)
    for option in mutation.set_headers if mutation is not None else ():
        option.append_action = _APPEND
        option.append.value = True
    if mutation is not None:
        del mutation.remove_headers[:]
    return answer


def _own_request_id(answer: Any) -> Any:
    mutation = _mutation(answer)
    if mutation is not None and mutation.set_headers:
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = "x-request-id", b"always-the-same"
    return answer


def _no_subset(request: Any) -> Any:
    request.ClearField("metadata_context")
    return request


def _subset_only_as_list(request: Any) -> Any:
    """The picker does not understand a hint as a comma string, and ignores the hint."""
    for hint in request.metadata_context.filter_metadata.values():
        if hint.fields and not hint.fields[f"{DESTINATION}-subset"].HasField("list_value"):
            return _no_subset(request)
    return request


def _subset_only_with_body(request: Any) -> Any:
    return _no_subset(request) if request.request_headers.end_of_stream else request


def _empty_subset_is_none(request: Any) -> Any:
    metadata = request.metadata_context.filter_metadata
    if (
        SUBSET_HINT in metadata
        and not metadata[SUBSET_HINT].fields[f"{DESTINATION}-subset"].list_value.values
    ):
        return _no_subset(request)
    return request


def _unread_body(request: Any) -> Any:
    """The picker never reads the prompt, because the proxy hides the path."""
    for header in request.request_headers.headers.headers:
        if header.key == ":path":
            header.raw_value = b"/unknown"
    return request


def _status(answer: Any, status: int) -> Any:
    if answer.HasField("immediate_response"):
        answer.immediate_response.status.code = status
    return answer


def _plain_text(answer: Any) -> Any:
    if answer.HasField("immediate_response"):
        answer.immediate_response.ClearField("headers")
        answer.immediate_response.body = b"bad request"
    return answer


def _a_byte_short(answer: Any, *, direction: str) -> Any:
    piece = _streamed(answer, direction)
    if piece is not None and len(piece.body) > 1:
        piece.body = piece.body[:-1]
    return answer


def _always_the_end(answer: Any) -> Any:
    """The picker marks every piece as the last."""
    piece = _streamed(answer, "request")
    if piece is not None:
        piece.end_of_stream = True
    return answer


def _no_test_header(request: Any) -> Any:
    headers = request.request_headers.headers.headers
    kept = [h for h in headers if h.key.lower() != "test-epp-endpoint-selection"]
    del headers[:]
    headers.extend(kept)
    return request


def _case_sensitive(request: Any) -> Any:
    headers = request.request_headers.headers.headers
    kept = [h for h in headers if h.key == h.key.lower()]
    del headers[:]
    headers.extend(kept)
    return request


FAULTS = {
    "body is never read": Fault(request=_unread_body),
    "comma string is no subset": Fault(request=_subset_only_as_list),
    "subset ignored": Fault(request=_no_subset),
    "subset ignored without a body": Fault(request=_subset_only_with_body),
    "empty subset ignored": Fault(request=_empty_subset_is_none),
    "test header ignored": Fault(request=_no_test_header),
    "names in lower case only": Fault(request=_case_sensitive),
    "no metadata": Fault(answer=_no_metadata),
    "metadata differs": Fault(answer=_other_metadata),
    "one destination": Fault(answer=_one_destination),
    "the same destination twice": Fault(answer=_twice_the_same),
    "IPv6 without brackets": Fault(answer=_no_brackets),
    "client's header kept": Fault(answer=_appended),
    "request id replaced": Fault(answer=_own_request_id),
    "500 for everything": Fault(answer=functools.partial(_status, status=500)),
    "errors in plain text": Fault(answer=_plain_text),
    "request a byte short": Fault(answer=functools.partial(_a_byte_short, direction="request")),
    "response a byte short": Fault(answer=functools.partial(_a_byte_short, direction="response")),
    "every piece ends the body": Fault(answer=_always_the_end),
    "streams end in an error": Fault(end=grpc.StatusCode.INTERNAL),
    "health by the letter of gRPC": Fault(healthy=False),
}


class _Proxy(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking ships no types
    def __init__(self, picker: PickerUnderTest, fault: Fault) -> None:
        self._picker = picker
        self._fault = fault

    async def process(self, _: Any, context: Any) -> None:
        call: Any = self._picker.channel.stream_stream(
            METHOD,
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )()
        forward = asyncio.create_task(self._forward(context, call))
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                await context.write(self._fault.answer(answer))
        finally:
            forward.cancel()
            await asyncio.gather(forward, return_exceptions=True)
            call.cancel()
        if self._fault.end is not grpc.StatusCode.OK:
            await context.abort(self._fault.end, "as told")

    async def _forward(self, context: Any, call: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await call.write(self._fault.request(message))
        await call.done_writing()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if self._fault.healthy:
            return await health_pb2_grpc.HealthStub(self._picker.channel).Check(request)
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        if not self._fault.healthy:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "watch is not implemented")
        async for answer in health_pb2_grpc.HealthStub(self._picker.channel).Watch(request):
            await context.write(answer)


@asynccontextmanager
async def faulty(picker: PickerUnderTest, fault: Fault) -> AsyncIterator[PickerUnderTest]:
    """Return `picker` as if it had the fault."""
    proxy = _Proxy(picker, fault)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler: Any = grpc.stream_stream_rpc_method_handler(
        proxy.process,
        request_deserializer=wire.ProcessingRequest.FromString,
        response_serializer=wire.ProcessingResponse.SerializeToString,
    )
    service = METHOD.split("/")[1]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Process": handler}),))
    health_pb2_grpc.add_HealthServicer_to_server(proxy, server)
    address = f"127.0.0.1:{free_port()}"
    assert server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield PickerUnderTest(
                channel=channel, endpoints=picker.endpoints, has=picker.has, pace=picker.pace
            )
    finally:
        await server.stop(None)
