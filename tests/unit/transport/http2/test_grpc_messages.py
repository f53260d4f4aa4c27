"""One gRPC message that comes in several parts."""

from __future__ import annotations

import pytest

from epp.transport.http2.grpc_messages import Assembly, BadMessageError, HeldBytes, Holder

MESSAGE = b"\0\0\0\0\x06abcdef"


def begun(held: HeldBytes, *, by: Holder | None = None, number: int = 1, now: float = 0.0) -> Assembly:
    return Assembly(held, number, holder=by or Holder(), now=now)


def test_a_message_that_alone_exceeds_the_bytes_of_all_is_refused() -> None:
    held = HeldBytes(most=2)
    with pytest.raises(BadMessageError, match="unfinished for too long"):
        begun(held).take(MESSAGE, 0, 8, max_bytes=6)
    assert (held.now, len(held.messages)) == (0, 0)


def test_a_connection_with_more_than_half_of_the_bytes_pays_itself() -> None:
    held, one, two = HeldBytes(most=20), Holder(), Holder()
    other = begun(held, by=two)
    for assembly in (other, *(begun(held, by=one, number=number) for number in (1, 3, 5))):
        assembly.take(MESSAGE, 0, 10, max_bytes=6)
    assert (one.torn, one.now, two.torn, held.now) == ([1], 10, [], 15)
    alone = begun(HeldBytes(most=6))
    assert alone.take(MESSAGE, 0, 11, max_bytes=6) == 11
    assert alone.whole() == b"abcdef", "a single message may be larger than the share"
