"""What a message may hold beside a body is bounded before anything of it is decoded."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.protocol import _wire
from epp.protocol.codec import MOST_BYTES, MOST_FIELDS, decode
from epp.protocol.header_names import DESTINATION
from epp.protocol.http_events import (
    BodyMode,
    Event,
    Modes,
    RequestBody,
    RequestHeaders,
    StreamProtocolError,
)

BROKEN = b"\xff"
"""Bytes behind a message. A message that is decoded is undecodable with them."""


def decoded(data: bytes) -> Event:
    return decode(data, names=frozenset({":path"}), response_names=frozenset({":status"}))


def part(number: int, content: bytes) -> bytes:
    size, head = len(content), b""
    while size > 0x7F:
        head += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((number << 3 | 2,)) + head + bytes((size,)) + content


def subset(values: bytes) -> bytes:
    """Return a message whose subset hint is a list with these entries."""
    value = part(2, part(6, values))
    hint = part(2, part(1, part(1, f"{DESTINATION}-subset".encode()) + value))
    return part(2, b"") + part(8, part(1, part(1, b"envoy.lb.subset_hint") + hint))


@pytest.mark.parametrize(
    "before", [b"", b"\x12\x00", b"\x1a\x00", b"\x22\x00", b"\x2a\x02\x10\x01", b"\x32\x00"]
)
def test_a_message_beside_its_body_has_at_most_256_kib(before: bytes) -> None:
    with pytest.raises(StreamProtocolError, match="message_too_large"):
        decoded(before + part(8, bytes(MOST_BYTES)) + BROKEN)


def test_a_body_is_not_bounded_and_not_copied_whatever_stands_beside_it() -> None:
    config = b"\x5a\x02\x08\x02"
    for after, modes in ((b"", None), (b"\x42\x00", None), (config, Modes(BodyMode.BUFFERED))):
        data = part(4, part(1, bytes(3 * MOST_BYTES)) + b"\x10\x01\x18\x00\x20\x01") + after
        event = decoded(data)
        assert isinstance(event, RequestBody)
        assert isinstance(event.data, memoryview)
        assert (len(event.data), event.end_of_stream, event.modes) == (3 * MOST_BYTES, True, modes)


@pytest.mark.parametrize(
    "data",
    [
        part(2, part(1, b"\x0a\x00" * MOST_FIELDS)),
        part(3, part(1, b"\x0a\x00" * MOST_FIELDS)),
        part(2, part(1, b"\x0a\x03\x0a\x01A" * MOST_FIELDS)),
        part(2, b"\x0a\x00" * MOST_FIELDS),
        part(2, b"\x8a\x00\x00" * MOST_FIELDS),
        b"\x12\x00" * (MOST_FIELDS + 1),
        b"\x12\x00\x22\x00" * MOST_FIELDS,
        part(6, part(1, b"\x0a\x00" * MOST_FIELDS)),
        part(2, b"") + part(8, b"\x0a\x00" * MOST_FIELDS),
        part(3, b"") + b"\x4a\x00" * MOST_FIELDS,
        part(3, b"") + part(9, part(2, b"\x0a\x00" * MOST_FIELDS)),
        subset(b"\x0a\x00" * MOST_FIELDS),
        subset(part(1, part(6, b"\x0a\x00" * MOST_FIELDS))),
        part(4, b"\x28\x01") + b"\x5a\x00" * MOST_FIELDS,
        part(2, b"") + b"\x78\x00" * MOST_FIELDS,
        part(2, b"") + b"\x7b\x7c" * MOST_FIELDS,
    ],
    ids=lambda data: data[:8].hex(),
)
def test_a_message_has_a_bounded_number_of_fields(data: bytes) -> None:
    assert len(data) < MOST_BYTES
    with pytest.raises(StreamProtocolError, match="too_many_fields"):
        decoded(data + BROKEN)


def test_nested_values_are_read_as_deep_as_protobuf_reads_them() -> None:
    for depth, read in ((20, True), (200, False)):
        value = b""
        for _ in range(depth):
            value = part(6, part(1, value))
        data = part(2, b"") + part(8, part(1, part(1, b"x") + part(2, part(1, part(2, value)))))
        assert (_wire.count_fields(data, MOST_FIELDS) > 0) == read
        if not read:
            with pytest.raises(StreamProtocolError, match="undecodable"):
                decoded(data)


def test_a_hint_may_list_4000_addresses() -> None:
    addresses = [f"10.{n // 250}.{n % 250}.1:8000" for n in range(4_000)]
    event = decoded(subset(b"".join(part(1, part(3, a.encode())) for a in addresses)))
    assert isinstance(event, RequestHeaders)
    assert event.subset == tuple(addresses)


def test_fields_are_counted_with_those_inside_of_them() -> None:
    message = ext_proc.ProcessingRequest()
    for name in ("a", "b", "c"):
        message.request_headers.headers.headers.add(key=name, raw_value=b"v")
    message.attributes["x"].fields["y"].string_value = "z"
    data = message.SerializeToString()
    # The request's two fields; the map and its three; name and value of the attribute; its entry, and in
    # the entry name, value and text.
    assert _wire.count_fields(data, 99) == 2 + 1 + 3 + 2 + 1 + 2 + 1
    assert _wire.count_fields(data, 5) == 6
    assert _wire.count_fields(data[:-1], 99) == -1
