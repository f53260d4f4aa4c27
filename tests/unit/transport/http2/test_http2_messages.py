"""Messages that DATA frames cut, join or leave unfinished."""

from io import BytesIO

import pytest
from typing_extensions import Buffer

from epp.transport.http2 import messages
from epp.transport.http2.messages import Assembly, BadMessageError, Fault, Gone, HeldBytes, Message
from tests.harness.http2_frames import CallerSide, data, grpc, headers, reset


@pytest.mark.parametrize(
    ("wire", "status", "reason"),
    [
        (grpc(b"x", compressed=1), 12, "compressed"),
        (grpc(b"x", compressed=7), 13, "bad_prefix"),
        (b"\0" + (2**20 + 1).to_bytes(4), 8, "message_too_large"),
    ],
)
def test_a_message_that_is_refused_ends_only_its_own_call(wire: bytes, status: int, reason: str) -> None:
    side = CallerSide().opened()
    events = side.feed(headers(1), headers(3), data(1, wire), data(3, grpc(b"fine")))
    assert events[2:] == [Fault(reason), Gone(1), Message(3, b"fine")]
    assert side.status(side.sent())[0] == status


def test_a_stream_that_ends_within_a_message_is_an_error() -> None:
    side = CallerSide().opened()
    events = side.feed(headers(1), data(1, grpc(b"hello")[:-1], ends=True))
    assert events[1:] == [Fault("cut_message"), Gone(1)]
    assert side.status(side.sent())[0] == 13
    assert side.held.now == 0


def test_oldest_unfinished_message_of_all_connections_pays_for_a_new_one() -> None:
    held = HeldBytes(1000)
    one, two = (CallerSide(held=held).opened() for _ in range(2))
    one.feed(headers(1), data(1, grpc(b"x" * 5000)[:900]))
    events = two.feed(headers(1), data(1, grpc(b"x" * 200)[:150]), data(1, grpc(b"x" * 200)[150:]))
    assert events[1:] == [Message(1, b"x" * 200)]
    assert held.now == 0
    assert one.tick(0.1) == [Fault("too_much_held"), Gone(1)]
    assert one.status(one.sent())[0] == 8


def test_a_reset_call_holds_no_bytes() -> None:
    side = CallerSide().opened()
    side.feed(headers(1), data(1, grpc(b"x" * 5000)[:900]), reset(1))
    assert (side.held.now, len(side.held.messages)) == (0, 0)


def test_a_message_that_finds_no_memory_is_not_counted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(BytesIO):
        """Loses its bytes when it finds no memory for more, as any BytesIO."""

        def write(self, data: Buffer) -> int:
            if not self.tell():
                return super().write(data)
            self.close()
            raise MemoryError

    monkeypatch.setattr(messages, "BytesIO", Full)
    side = CallerSide().opened()
    side.feed(headers(1), data(1, grpc(b"x" * 5000)[:900]))
    with pytest.raises(MemoryError):
        side.feed(data(1, b"x" * 900))
    assert side.connection.close(now=side.now) == [Gone(1)]
    assert (side.held.now, len(side.held.messages)) == (0, 0)


def test_the_messages_of_one_frame_are_read_in_portions() -> None:
    side = CallerSide().opened()
    side.feed(headers(1))
    most, found = 0, 0
    events = side.feed(data(1, grpc(b"") * 1000), limit=16)
    while events:
        most, found = max(most, len(events)), found + len(events)
        events = side.feed(limit=16)
    assert (found, side.connection.pending) == (1000, False)
    assert most <= 16


# -- a message that comes in several parts ------------------------------------------------------------------

MESSAGE = b"\0\0\0\0\x06abcdef"


def begun(held: HeldBytes, *, by: HeldBytes | None = None, number: int = 1) -> Assembly:
    return Assembly(held, number, own=by or held.of_a_connection(), now=0.0)


def test_a_message_that_alone_exceeds_the_bytes_of_all_is_refused() -> None:
    held = HeldBytes(most=2)
    with pytest.raises(BadMessageError, match="unfinished for too long"):
        begun(held).take(MESSAGE, 0, 8, max_bytes=6)
    assert (held.now, len(held.messages)) == (0, 0)


def test_a_connection_with_more_than_half_of_the_bytes_pays_itself() -> None:
    held = HeldBytes(most=20)
    one, two = held.of_a_connection(), held.of_a_connection()
    other = begun(held, by=two)
    for assembly in (other, *(begun(held, by=one, number=number) for number in (1, 3, 5))):
        assembly.take(MESSAGE, 0, 10, max_bytes=6)
    assert (one.torn, one.now, two.torn, held.now) == ([1], 10, [], 15)
    alone = begun(HeldBytes(most=6))
    assert alone.take(MESSAGE, 0, 11, max_bytes=6) == 11
    assert alone.whole() == b"abcdef", "a single message may be larger than the share"
