"""Our own reader of header messages reads what protobuf reads, whatever the bytes are."""

from typing import Any

import msgspec
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.config.policy import PolicySpec
from epp.protocol.asking import request_names
from epp.protocol.codec import decode, echoes_in, encode
from epp.protocol.header_names import RESPONSE_NAMES
from epp.protocol.http_events import (
    BodyMode,
    Headers,
    HttpEvent,
    Modes,
    Piece,
    Slot,
    StreamProtocolError,
)
from tests.fuzz.trees import as_protobuf

NAMES = request_names(PolicySpec(session_header="x-session", debug_header="x-why"))
WANTED = sorted(NAMES | RESPONSE_NAMES)
FILTER = "envoy.filters.http.ext_proc"
KEY = "x-gateway-destination-endpoint"
HOSTILE = b"\x0a\x12\x0a\x05:path\x1a\x09/v1/other"
"""The bytes of a whole header. The test puts them into a value."""


def part(number: int, content: bytes) -> bytes:
    return as_protobuf([[number, content]])


def expected(data: bytes) -> HttpEvent:
    """Return what protobuf alone reads from the message. Raises the errors that protobuf raises, and KeyError
    for a message of another kind.
    """
    message = ext_proc.ProcessingRequest.FromString(data)
    kind = message.WhichOneof("request")
    if kind not in ("request_headers", "response_headers", "request_body", "response_body"):
        raise KeyError(kind)
    body, modes = getattr(message, kind), None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = Modes(
            BodyMode(config.request_body_mode),
            BodyMode(config.response_body_mode),
        )
    if kind.endswith("body"):
        return Piece(Slot(kind), body.body, body.end_of_stream, modes)
    names = NAMES if kind == "request_headers" else RESPONSE_NAMES
    headers = [
        (h.key.lower(), (h.raw_value or h.value.encode()).decode("latin-1"))
        for h in body.headers.headers
        if h.key.lower() in names
    ]
    subset = subset_of(message) if kind == "request_headers" else None
    return Headers(Slot(kind), headers, body.end_of_stream, modes, subset, served_by(message))


def subset_of(message: Any) -> tuple[str, ...] | None:
    spaces = message.metadata_context.filter_metadata
    if "envoy.lb.subset_hint" not in spaces or f"{KEY}-subset" not in spaces["envoy.lb.subset_hint"].fields:
        return None
    value = spaces["envoy.lb.subset_hint"].fields[f"{KEY}-subset"]
    listed = value.HasField("list_value")
    return tuple(v.string_value for v in value.list_value.values) if listed else (value.string_value,)


def served_by(message: Any) -> str:
    for attributes in message.attributes.values():
        if "upstream.address" in attributes.fields:
            return str(attributes.fields["upstream.address"].string_value)
    spaces = message.metadata_context.filter_metadata
    if "envoy.lb" in spaces and f"{KEY}-served" in spaces["envoy.lb"].fields:
        return str(spaces["envoy.lb"].fields[f"{KEY}-served"].string_value)
    return ""


def decoded(data: bytes) -> HttpEvent:
    event = decode(data, names=NAMES)
    if isinstance(event, Headers) and event.slot is Slot.RESPONSE_HEADERS:
        return msgspec.structs.replace(event, subset=None)  # nobody reads it there
    return event


texts = st.text(max_size=5)
values = st.one_of(
    st.binary(max_size=12),
    st.just(HOSTILE),
    st.binary(max_size=4).map(lambda b: HOSTILE + b),
    st.sampled_from([b"", b"x" * 127, b"x" * 128, HOSTILE * 20, b"y" * 20_000]),
)
names = st.one_of(
    st.sampled_from(WANTED),
    st.sampled_from(
        ["user-agent", "cookie", ":PATH", "Content-Length", "x-to\u212aen", "", "x" * 127, "x" * 128]
    ),
    texts,
)
usual_headers = st.builds(
    lambda name, value: part(1, name.encode()) + (part(3, value) if value else b""), names, values
)
odd_headers = st.lists(
    st.one_of(
        names.map(lambda name: part(1, name.encode())),
        texts.map(lambda value: part(2, value.encode())),
        values.map(lambda value: part(3, value)),
        values.map(lambda value: part(4, value)),
        st.sampled_from([b"\x20\x05", b"\x1a\x80\x00", b"\x1a\x81\x00a"]),
    ),
    max_size=4,
).map(b"".join)
header_maps = st.lists(usual_headers | odd_headers, max_size=6).map(
    lambda headers: b"".join(part(1, header) for header in headers)
)
usual_maps = st.lists(usual_headers, max_size=16).map(
    lambda headers: b"".join(part(1, header) for header in headers)
)


def headers_part(header_map: bytes, rest: bytes) -> bytes:
    return part(1, header_map) + rest


parts = st.builds(
    headers_part,
    usual_maps | header_maps,
    st.sampled_from([b"", b"\x18\x01", b"\x18\x00", b"\x18\x02", b"\x20\x01"]),
) | st.lists(header_maps.map(lambda m: part(1, m)) | st.sampled_from([b"\x18\x01"]), max_size=3).map(b"".join)


def metadata(space: str, key: str, value: str) -> bytes:
    message = ext_proc.ProcessingRequest()
    message.metadata_context.filter_metadata[space].fields[key].string_value = value
    return bytes(message.SerializeToString())


def subset_list(entries: list[str]) -> bytes:
    message = ext_proc.ProcessingRequest()
    value = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[f"{KEY}-subset"]
    value.list_value.SetInParent()
    for entry in entries:
        value.list_value.values.add().string_value = entry
    return bytes(message.SerializeToString())


def attributes(space: str, key: str, value: str) -> bytes:
    message = ext_proc.ProcessingRequest()
    message.attributes[space].fields[key].string_value = value
    return bytes(message.SerializeToString())


around = st.lists(
    st.one_of(
        st.sampled_from([b"\x42\x00", part(8, part(1, part(1, b"envoy.lb.subset_hint")))]),
        st.builds(
            metadata, st.sampled_from(["envoy.lb", "other"]), st.sampled_from([KEY, f"{KEY}-served"]), texts
        ),
        st.builds(metadata, st.just("envoy.lb.subset_hint"), st.just(f"{KEY}-subset"), texts),
        st.lists(texts, max_size=3).map(subset_list),
        st.builds(
            attributes,
            st.sampled_from([FILTER, "other"]),
            st.sampled_from(["upstream.address", "request.id"]),
            texts | st.just("a" * 600),
        ),
        st.sampled_from([b"\x5a\x02\x08\x02", b"\x5a\x04\x08\x04\x10\x04", b"\x5a\x00", b"\x50\x01"]),
        values.map(lambda content: part(13, content)),
    ),
    max_size=3,
).map(b"".join)
messages = st.builds(
    lambda number, content, before, after: before + part(number, content) + after,
    st.sampled_from([2, 3]),
    parts,
    st.just(b"") | st.just(b"") | around,
    around,
)


def spoiled(data: bytes, draw: st.DataObject) -> bytes:
    """Change up to three places of the message, or none."""
    broken = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 3))):
        at = draw.draw(st.integers(0, len(broken)))
        broken[at : at + draw.draw(st.integers(0, 2))] = draw.draw(st.binary(max_size=2))
    return bytes(broken)


@given(st.sampled_from([2, 3]), usual_maps, usual_maps, around)
def test_two_messages_in_one_are_merged_or_too_long(
    number: int, first: bytes, second: bytes, after: bytes
) -> None:
    head, same, other = (
        part(n, part(1, fields)) for n, fields in ((number, first), (number, second), (5 - number, second))
    )
    for rest in (after + same, other + after):
        try:
            found = decoded(head + rest)
        except StreamProtocolError as error:
            if error.reason != "too_many_fields" or len(rest) <= 512:
                raise
        else:
            assert found == expected(head + rest)


@settings(max_examples=200)
@given(messages, st.data())
def test_a_header_message_is_read_as_protobuf_reads_it(data: bytes, draw: st.DataObject) -> None:
    data = spoiled(data, draw)
    try:
        wanted = expected(data)
    except (DecodeError, ValueError, KeyError):  # the message is broken, or is now of another kind
        return
    assert decoded(data) == wanted


@given(st.data())
def test_a_cut_header_message_is_never_read_beyond_its_end(draw: st.DataObject) -> None:
    data = part(2, part(1, draw.draw(usual_maps)) + b"\x18\x01")
    cut = data[: draw.draw(st.integers(0, len(data) - 1))]
    with pytest.raises(StreamProtocolError):
        decoded(cut)


bodies = st.builds(
    lambda number, content, end, after: part(number, part(1, content) + end) + after,
    st.sampled_from([4, 5]),
    st.sampled_from([b"", b"{}", b"x" * 127, b"x" * 128, b"y" * 20_000]) | st.binary(max_size=8),
    st.sampled_from([b"", b"\x10\x00", b"\x10\x01", b"\x10\x02", b"\x0a\x01z", b"\x0a\x80\x00"]),
    around | st.binary(max_size=4) | st.builds(part, st.sampled_from([4, 5, 6]), st.binary(max_size=4)),
)


@given(bodies, st.data())
def test_a_body_message_is_refused_or_read_as_protobuf_reads_it(data: bytes, draw: st.DataObject) -> None:
    data = spoiled(data, draw)
    try:
        wanted = expected(data)
    except (DecodeError, ValueError):
        with pytest.raises(StreamProtocolError):
            decoded(data)
        return
    except KeyError:  # the message is now of another kind
        return
    assert decoded(data) == wanted


@given(
    st.sampled_from([Slot.REQUEST_BODY, Slot.RESPONSE_BODY]),
    st.binary(max_size=300) | st.integers(0, 62_000).map(bytes),
    st.booleans(),
)
def test_an_echo_has_the_bytes_that_protobuf_writes(slot: Slot, data: bytes, end: bool) -> None:  # noqa: FBT001 - Hypothesis gives them
    message = ext_proc.ProcessingResponse()
    streamed = getattr(message, slot.value).response.body_mutation.streamed_response
    streamed.SetInParent()
    streamed.body = data
    streamed.end_of_stream = end
    assert encode(Piece(slot, memoryview(data), end_of_stream=end)) == message.SerializeToString()


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4) + message


@given(
    st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_all_pieces_of_a_frame_are_passed_on_unchanged(pieces: list[bytes], before: int, behind: int) -> None:
    message = ext_proc.ProcessingRequest()
    sent = answers = b""
    for piece in pieces:
        message.response_body.body = piece
        sent += framed(message.SerializeToString())
        answers += framed(encode(Piece(Slot.RESPONSE_BODY, piece)))
    data = b"?" * before + sent + b"?" * behind
    assert echoes_in(data, before, before + len(sent)) == answers
    assert behind == 0 or echoes_in(data, before, len(data)) is None


@pytest.mark.parametrize(("at", "end"), [(0, 0), (-1, 9), (9, 3), (0, 99), (1, 9), (0, 8)])
def test_incomplete_messages_have_no_echoes(at: int, end: int) -> None:
    data = framed(b"\x2a\x02\x0a\x00") * 2
    assert echoes_in(data, 0, 9) == framed(encode(Piece(Slot.RESPONSE_BODY, b"")))
    assert echoes_in(data, at, end) is None


@pytest.mark.parametrize("change", ["ends", "request", "tells the modes", "too long", "compressed", "longer"])
def test_a_frame_with_another_message_is_decoded(change: str) -> None:
    message, plain = ext_proc.ProcessingRequest(), ext_proc.ProcessingRequest()
    plain.response_body.body = b"plain"
    part = message.request_body if change == "request" else message.response_body
    part.body = b"data" * (20_000 if change == "too long" else 1)
    part.end_of_stream = change == "ends"
    if change == "tells the modes":
        message.protocol_config.response_body_mode = 4
    wire = bytearray(framed(message.SerializeToString()))
    wire[0] = change == "compressed"
    wire[4] += change == "longer"
    data = framed(plain.SerializeToString()) + bytes(wire)
    assert echoes_in(data, 0, len(data)) is None
