"""The headers of a request: the decoder of one connection, the blocks that it need not decode again, and
headers that are refused.
"""

from __future__ import annotations

import pytest

from epp.transport.http2.frames import HeaderReader, Limits
from epp.transport.http2.messages import Fault
from tests.harness.http2_frames import NO_TABLE, PATH, CallerSide, block, continuation, data, headers


def test_header_blocks_are_kept_once_the_peer_has_given_up_its_table() -> None:
    reader = HeaderReader(Limits(max_message_bytes=1))
    reader.request(block())
    assert not reader.known
    reader.request(NO_TABLE + block())
    request = reader.request(block())
    assert reader.known[block()] is request
    assert request.path == PATH


def test_the_number_of_known_blocks_is_bounded() -> None:
    reader = HeaderReader(Limits(max_message_bytes=1))
    reader.request(NO_TABLE + block())
    for n in range(400):
        reader.request(block(replace=[("x", str(n))]))
        assert 0 < len(reader.known) <= 256


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([("content-type", "text/html")], 415),
        ([("content-type", "application/grpcx")], 415),
        ([(":method", "GET")], 405),
    ],
)
def test_a_request_that_is_not_a_grpc_call_gets_an_http_answer(
    fields: list[tuple[str, str]], status: int
) -> None:
    side = CallerSide().opened()
    assert side.feed(headers(1, block(replace=fields))) == [Fault("no_grpc_call")]
    head, body = side.sent()
    assert side.fields(head)[":status"] == str(status)
    assert b"speaks gRPC alone" in body.payload
    assert body.ends
    assert side.feed(data(1, b"whatever", ends=True)) == []
    assert side.connection.streams == 0


def test_endless_continuation_frames_end_the_connection() -> None:
    side = CallerSide().opened()
    side.feed(headers(1, b"", whole=False))
    events = side.feed(*(continuation(1, b"", whole=False) for _ in range(20)))
    assert events[-1] == Fault("continuation_flood")
    side = CallerSide().opened()
    side.feed(headers(1, bytes(9000), whole=False))
    assert side.feed(continuation(1, bytes(9000), whole=False))[-1] == Fault("header_list_too_large")
