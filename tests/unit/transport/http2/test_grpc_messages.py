"""One gRPC message that comes in several parts."""

from __future__ import annotations

import pytest

from epp.transport.http2 import grpc_messages
from epp.transport.http2.grpc_messages import Assembly, BadMessageError, HeldBytes, Holder, message_bytes

MESSAGE = b"\0\0\0\0\x06abcdef"


def begun(held: HeldBytes, *, by: Holder | None = None, number: int = 1, now: float = 0.0) -> Assembly:
    return Assembly(held, number, holder=by or Holder(), now=now)


@pytest.mark.parametrize("part_bytes", range(1, len(MESSAGE) + 1))
def test_a_message_is_whole_after_its_last_part_and_what_follows_is_left(part_bytes: int) -> None:
    held = HeldBytes(most=100)
    assembly, data = begun(held), MESSAGE + b"rest"
    at = 0
    while (message := assembly.whole()) is None:
        at = assembly.take(data, at, min(at + part_bytes, len(MESSAGE)), max_bytes=6)
    assert (message, data[at:], held.now) == (b"abcdef", b"rest", 0)


def test_bytes_are_counted_while_they_are_held() -> None:
    held = HeldBytes(most=100)
    assembly = begun(held)
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


def test_a_message_that_alone_exceeds_the_bytes_of_all_is_refused() -> None:
    held = HeldBytes(most=2)
    with pytest.raises(BadMessageError, match="unfinished for too long"):
        begun(held).take(MESSAGE, 0, 8, max_bytes=6)
    assert (held.now, len(held.messages)) == (0, 0)


def test_the_oldest_message_makes_room_for_a_new_one() -> None:
    held, by = HeldBytes(most=9), [Holder() for _ in range(3)]
    old, middle, new = (begun(held, by=holder) for holder in by)
    for each in (middle, old, new):
        each.take(MESSAGE, 0, 9, max_bytes=6)
    assert ([holder.torn for holder in by], held.now) == ([[1], [], []], 8)
    assert new.take(MESSAGE, 9, 11, max_bytes=6) == 11
    assert new.whole() == b"abcdef"
    with pytest.raises(BadMessageError):
        old.take(MESSAGE, 9, 11, max_bytes=6)


def test_a_connection_with_more_than_half_of_the_bytes_pays_itself() -> None:
    held, one, two = HeldBytes(most=20), Holder(), Holder()
    other = begun(held, by=two)
    for assembly in (other, *(begun(held, by=one, number=number) for number in (1, 3, 5))):
        assembly.take(MESSAGE, 0, 10, max_bytes=6)
    assert (one.torn, one.now, two.torn, held.now) == ([1], 10, [], 15)
    alone = begun(HeldBytes(most=6))
    assert alone.take(MESSAGE, 0, 11, max_bytes=6) == 11
    assert alone.whole() == b"abcdef", "a single message may be larger than the share"


def test_messages_that_began_too_long_ago_are_thrown_away() -> None:
    held, by = HeldBytes(most=100), Holder()
    old, new = (begun(held, number=number, by=by, now=number) for number in (1, 3))
    for each in (old, new):
        each.take(MESSAGE, 0, 8, max_bytes=6)
    held.expire(began_before=2.0)
    assert (by.torn, held.now, old.lost, new.lost) == ([1], 3, "message_too_slow", "")
