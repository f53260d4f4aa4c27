"""One gRPC message that comes in several parts."""

from __future__ import annotations

import pytest

from epp.http2 import grpc_messages
from epp.http2.grpc_messages import Assembly, BadMessageError, message_bytes
from epp.http2.limits import HeldBytes

MESSAGE = b"\0\0\0\0\x06abcdef"


@pytest.mark.parametrize("part_bytes", range(1, len(MESSAGE) + 1))
def test_a_message_is_whole_after_its_last_part_and_what_follows_is_left(part_bytes: int) -> None:
    held = HeldBytes(most=100)
    assembly, data = Assembly(held), MESSAGE + b"rest"
    at = 0
    while (message := assembly.whole()) is None:
        at = assembly.take(data, at, min(at + part_bytes, len(MESSAGE)), max_bytes=6)
    assert (message, data[at:], held.now) == (b"abcdef", b"rest", 0)


def test_an_assembly_says_which_bytes_it_takes_without_a_search() -> None:
    held = HeldBytes(most=5)
    assembly = Assembly(held)
    assembly.take(MESSAGE, 0, 6, max_bytes=6)
    assert [assembly.takes(size) for size in (0, 4, 5, 6)] == [False, True, False, False]
    assert assembly.with_part(b"bcd") is None
    assert held.now == 4
    held.most = 10
    assert assembly.with_part(b"ef") == b"abcdef"


def test_bytes_are_counted_while_they_are_held() -> None:
    held = HeldBytes(most=100)
    assembly = Assembly(held)
    assembly.take(MESSAGE, 0, 8, max_bytes=6)
    assert held.now == 3
    assembly.drop()
    assert held.now == 0


@pytest.mark.parametrize(
    ("prefix", "status", "reason"),
    [
        (b"\1\0\0\0\1", grpc_messages.UNIMPLEMENTED, "compressed"),
        (b"\2\0\0\0\1", grpc_messages.INTERNAL, "bad_prefix"),
        (b"\0\0\0\0\7", grpc_messages.RESOURCE_EXHAUSTED, "message_too_large"),
    ],
)
def test_a_message_that_is_refused_names_its_status_and_reason(
    prefix: bytes, status: int, reason: str
) -> None:
    with pytest.raises(BadMessageError) as refused:
        message_bytes(prefix, 0, max_bytes=6)
    assert (refused.value.status, refused.value.reason) == (status, reason)


def test_a_part_that_would_exceed_the_bytes_of_all_messages_is_refused() -> None:
    held = HeldBytes(most=2)
    with pytest.raises(BadMessageError, match="too many unfinished messages"):
        Assembly(held).take(MESSAGE, 0, 8, max_bytes=6)
