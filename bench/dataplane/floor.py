"""Runs the floor: a bare grpc.aio server that answers ext_proc's messages with constants and decodes none of
them.

    python -m bench.dataplane.floor unix:/PATH ADDRESS...

Any picker in Python on grpc.aio costs at least as much as this server. The server runs on the same loop
(uvloop), with the same messages in the same order, on streams that it holds until the HTTP request ends. Its
answers name ADDRESS... in turn. Bodies of FULL_DUPLEX_STREAMED are echoed unchanged: the bytes inside a body
message are the same in both directions, and only the fields around them differ.

It runs on the defaults of gRPC, of the memory allocator and of the garbage collector.
"""

import itertools
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import uvloop

from epp.protocol.codec import encode
from epp.protocol.conversation import SERVICE
from epp.protocol.header_names import DESTINATION
from epp.protocol.http_events import Answer, Slot

_REQUEST_HEADERS: Final = 0x12
_RESPONSE_HEADERS: Final = 0x1A
REQUEST_BODY: Final = 0x22
_RESPONSE_BODY: Final = 0x2A
PLAIN: Final = {
    _REQUEST_HEADERS: encode(Answer(Slot.REQUEST_HEADERS)),
    _RESPONSE_HEADERS: encode(Answer(Slot.RESPONSE_HEADERS)),
    0x32: encode(Answer(Slot.REQUEST_TRAILERS)),
    0x3A: encode(Answer(Slot.RESPONSE_TRAILERS)),
}
_ANSWER_TAG: Final = {REQUEST_BODY: b"\x1a", _RESPONSE_BODY: b"\x22"}

_END_OF_STREAM: Final = b"\x10\x01"

_FULL_DUPLEX: Final = bytes((0x5A, 4, 0x08, 4, 0x10, 4))
"""protocol_config (field 11) of a first message whose two body modes are FULL_DUPLEX_STREAMED."""

Call = Callable[[Any, Any], Awaitable[None]]


def destination(slot: Slot, address: str) -> bytes:
    answer = Answer(slot, set_headers=((DESTINATION, address),), destination=address)
    return encode(answer)


def handler(addresses: Sequence[str]) -> Call:
    """Return the Process method."""
    on_body = itertools.cycle([destination(Slot.REQUEST_BODY, a) for a in addresses])
    on_headers = itertools.cycle([destination(Slot.REQUEST_HEADERS, a) for a in addresses])

    async def process(_: Any, context: Any) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.endswith(_FULL_DUPLEX):
            await _duplex(context, next(on_headers))
            return
        await context.write(PLAIN[_REQUEST_HEADERS])
        while (data := await context.read()) is not grpc.aio.EOF:
            await context.write(next(on_body) if data[0] == REQUEST_BODY else PLAIN[data[0]])

    return process


async def _duplex(context: Any, picked: bytes) -> None:
    held: list[bytes] | None = []
    while (data := await context.read()) is not grpc.aio.EOF:
        if data[0] not in _ANSWER_TAG:
            await context.write(PLAIN[data[0]])
            continue
        echo, is_end = _echo(data)
        if data[0] == REQUEST_BODY and held is not None:
            held.append(echo)
            if is_end:
                for message in (picked, *held):
                    await context.write(message)
                held = None
        else:
            await context.write(echo)


def _echo(data: bytes) -> tuple[bytes, bool]:
    """Return the answer to a body message, and whether this message was the last of its body."""
    size, start = _varint(data, 1)
    body = data[start : start + size]
    # response (1) > body_mutation (3) > streamed_response (3), each with the length of its content.
    streamed = b"\x1a" + _length(len(body))
    mutation = b"\x1a" + _length(len(streamed) + len(body))
    common = b"\x0a" + _length(len(mutation) + len(streamed) + len(body))
    answer = _ANSWER_TAG[data[0]] + _length(len(common) + len(mutation) + len(streamed) + len(body))
    return b"".join((answer, common, mutation, streamed, body)), body.endswith(_END_OF_STREAM)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _length(size: int) -> bytes:
    out = bytearray()
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


async def _serve(listen: str, addresses: Sequence[str]) -> None:
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", 2**26), ("grpc.max_send_message_length", -1)]
    )
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Process": grpc.stream_stream_rpc_method_handler(handler(addresses))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(listen)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2:]))
