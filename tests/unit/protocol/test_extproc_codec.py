"""Messages of an unusual form, and the bounds of what a message may hold beside a body."""

import sys
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.protocol.codec import MOST_ATTRIBUTES, MOST_BYTES, MOST_HEADERS, decode, encode
from epp.protocol.header_names import DESTINATION, MOST_ADDRESSES
from epp.protocol.http_events import (
    Answer,
    BodyMode,
    Delay,
    Headers,
    HttpEvent,
    Modes,
    Piece,
    Refuse,
    Slot,
    StreamProtocolError,
)
from tests.fuzz.trees import as_protobuf

BROKEN = b"\xff"
"""Bytes behind a message. A message that is decoded is undecodable with them."""


def decoded(data: bytes) -> HttpEvent:
    return decode(data, names=frozenset({":path"}))


def part(number: int, content: bytes) -> bytes:
    return as_protobuf([[number, content]])


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
        assert isinstance(event, Piece)
        assert isinstance(event.data, memoryview)
        assert (len(event.data), event.end_of_stream, event.modes) == (3 * MOST_BYTES, True, modes)


@pytest.mark.parametrize(
    "beside", [2 * part(9, part(1, b"filter") + part(2, b"")), b"\x50\x01", part(12, b"of a later Envoy")]
)
def test_a_body_is_not_bounded_beside_fields_that_are_not_read(beside: bytes) -> None:
    event = decoded(part(4, part(1, bytes(300_000)) + b"\x10\x01") + beside + b"\x5a\x02\x08\x02")
    assert isinstance(event, Piece)
    assert (len(event.data), event.modes) == (300_000, Modes(BodyMode.BUFFERED))
    with pytest.raises(StreamProtocolError, match="message_too_large"):
        decoded(part(4, part(1, b"body")) + beside + part(8, bytes(MOST_BYTES)))


PATH = part(1, part(1, b":path"))
UPPER = part(1, part(1, b"A"))
STATUS = part(1, part(1, b":status"))
ATTRIBUTES = b"".join(part(9, part(1, b"%d" % n)) for n in range(MOST_ATTRIBUTES + 1))


@pytest.mark.parametrize(
    "data",
    [
        part(2, part(1, PATH * (MOST_HEADERS + 1))),
        part(2, part(1, UPPER * (MOST_HEADERS + 1))),
        part(2, part(1, part(1, part(1, b"a")) * (MOST_HEADERS + 1))),
        part(3, part(1, STATUS * (MOST_HEADERS + 1))),
        part(3, part(1, UPPER * (MOST_HEADERS + 1))),
        part(2, b"") + ATTRIBUTES,
        part(3, b"") + ATTRIBUTES,
        part(3, part(1, UPPER)) + ATTRIBUTES,
        part(4, b"\x28\x01") + ATTRIBUTES,
    ],
    ids=lambda data: data[:8].hex(),
)
def test_a_message_has_a_bounded_number_of_headers_and_attributes(data: bytes) -> None:
    assert len(data) < MOST_BYTES
    with pytest.raises(StreamProtocolError, match="too_many_fields"):
        decoded(data)


def test_a_second_main_part_is_not_decoded_twice_if_it_is_long() -> None:
    called: list[str] = []
    for number in (2, 3):
        data = part(number, part(1, PATH)) + part(2, part(1, PATH * 2_000))
        sys.setprofile(lambda _, event, what: called.append(what.__name__) if event == "c_call" else None)
        try:
            with pytest.raises(StreamProtocolError, match="too_many_fields"):
                decoded(data)
        finally:
            sys.setprofile(None)
    assert called.count("FromString") == 2


def naming(address: str) -> bytes:
    """Return the attributes by which Envoy names the server that served."""
    message = asked()
    message.attributes["a filter"].fields["upstream.address"].string_value = address
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("entry", [b"10.0.0.1:8000", b"\xff"])
@pytest.mark.parametrize("count", [1, 1_000])
def test_metadata_of_a_response_are_not_read_if_its_server_is_named(entry: bytes, count: int) -> None:
    hint = subset(part(1, part(3, entry)) * count).removeprefix(part(2, b""))
    named = naming("10.0.0.2:8000")
    data, called = part(3, part(1, STATUS)) + hint + named, list[str]()
    for _ in range(2):
        called.clear()
        sys.setprofile(lambda _, event, what: called.append(what.__name__) if event == "c_call" else None)
        try:
            event = decoded(data)
        finally:
            sys.setprofile(None)
        assert isinstance(event, Headers)
        assert (event.headers, event.served) == ([(":status", "")], "10.0.0.2:8000")
    assert "FromString" not in called


@pytest.mark.parametrize(
    "metadata",
    [
        b"\x42",
        b"\x42\x80",
        b"\x42\x7f",
        b"\x42\xff\xff\x7f",
        b"\x42" + 9 * b"\x80" + b"\x02",
    ],
)
def test_metadata_of_a_response_without_a_whole_length_are_undecodable(metadata: bytes) -> None:
    for behind in (b"", naming("10.0.0.2:8000")):
        with pytest.raises(StreamProtocolError, match="undecodable"):
            decoded(part(3, part(1, STATUS)) + metadata + behind)


def test_values_that_are_nested_too_deeply_are_undecodable() -> None:
    value = b""
    for _ in range(200):
        value = part(6, part(1, value))
    with pytest.raises(StreamProtocolError, match="undecodable"):
        decoded(part(2, b"") + part(8, part(1, part(1, b"x") + part(2, part(1, part(2, value))))))


def test_a_hint_may_list_4000_addresses_or_nothing() -> None:
    addresses = [f"10.{n // 250}.{n % 250}.1:8000" for n in range(4_000)]
    event = decoded(subset(b"".join(part(1, part(3, a.encode())) for a in addresses)))
    assert isinstance(event, Headers)
    assert event.subset == tuple(addresses)
    for nothing in (b"", part(2, b"")):
        event = decoded(part(2, b"") + part(8, part(1, part(1, b"envoy.lb.subset_hint") + nothing)))
        assert isinstance(event, Headers)
        assert event.subset is None
    endless = decoded(subset(b"\x0a\x00" * (MOST_ADDRESSES + 1)))
    assert isinstance(endless, Headers)
    assert endless.subset == ("",) * MOST_ADDRESSES


def asked(**parts: Any) -> ext_proc.ProcessingRequest:
    return ext_proc.ProcessingRequest(**parts)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff", "undecodable"),
        (b"", "empty_message"),
        (asked(protocol_config={}).SerializeToString(), "empty_message"),
        (b"\x2a\x00\x5a\x02\x08\x09", "unknown_body_mode"),
    ],
)
def test_other_bytes_are_one_typed_error(data: bytes, reason: str) -> None:
    with pytest.raises(StreamProtocolError, match=reason):
        decode(data, names=frozenset())


@pytest.mark.parametrize(
    ("details", "attempts", "lost"),
    [
        ("upstream_reset_before_response_started{connection_termination}", 2, 2),
        ("upstream_reset_before_response_started{remote_reset|TLS_error}", None, 1),
        ("upstream_reset_before_response_started{connection_termination}", float("nan"), 1),
        ("upstream_reset_before_response_started{connection_termination}", float("inf"), 16),
        ("upstream_reset_before_response_started{remote_connection_failure}", 2, 0),
        ("via_upstream", 2, 0),
    ],
)
@pytest.mark.parametrize("status", [[], [(":status", "503")]])
def test_servers_that_a_request_ended_are_read_beside_any_headers(
    details: str, attempts: float | None, lost: int, status: list[tuple[str, str]]
) -> None:
    message = asked(response_headers={"end_of_stream": True})
    for key, value in status:
        message.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    fields = message.attributes["a filter"].fields
    fields["response.code_details"].string_value = details
    if attempts is not None:
        fields["upstream.request_attempt_count"].number_value = attempts
    event = decoded(message.SerializeToString())
    assert isinstance(event, Headers)
    assert (event.headers, event.lost) == (status, lost)


def encoded(action: Answer | Refuse | Delay) -> ext_proc.ProcessingResponse:
    return ext_proc.ProcessingResponse.FromString(encode(action))


def test_an_answer_changes_headers_and_the_body_and_asks_for_more() -> None:
    answer = Answer(
        Slot.RESPONSE_HEADERS,
        set_headers=(("x-a", "é€"),),
        remove_headers=("x-b",),
        body=b"changed",
        stream_response=True,
    )
    response = encoded(answer)
    common = response.response_headers.response
    (option,) = common.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-a", b"\xe9?")
    assert list(common.header_mutation.remove_headers) == ["x-b"]
    assert common.body_mutation.body == b"changed"
    assert response.mode_override.response_body_mode == 1, "STREAMED"


def test_a_refusal_and_a_delay() -> None:
    refuse = Refuse(status=429, headers=(("retry-after", "3"),), body=b"{}", reason="saturated")
    immediate = encoded(refuse).immediate_response
    assert (immediate.status.code, immediate.body) == (429, b"{}")
    assert immediate.details.endswith("saturated")
    assert immediate.headers.set_headers[0].header.raw_value == b"3"
    assert encoded(Delay(1.5)).override_message_timeout.ToMilliseconds() == 1500
