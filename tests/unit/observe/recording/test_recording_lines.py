"""The lines of a recording, as they are written and read."""

import json
from typing import Any

import pytest

from epp.base.types import pack_hashes, unpack_hashes
from epp.observe.recording import Opening, RecordedRequest, ServerLine, Servers, decode, encode

REQUEST: dict[str, Any] = {
    "line": "request",
    "at_unix_s": 1000.5,
    "kind": "chat",
    "prompt_bytes": 8000,
    "prompt_tokens": 2000,
    "reason": "least-cost",
    "server": "a",
    "outcome": "ended",
    "ended_s": 1.5,
}


def line(**changed: Any) -> bytes:
    return json.dumps(REQUEST | changed).encode()


def test_lines_of_each_kind_come_back_as_they_were_written() -> None:
    request = decode(line(chunks="AQAAAAAAAAA=", ttft_s=0.25))
    assert isinstance(request, RecordedRequest)
    assert (unpack_hashes(request.chunks), request.ttft_s, request.status) == ([1], 0.25, None)
    opening = Opening(
        chunk_bytes=256, later_chunk_bytes=1024, later_from_bytes=8192, hashing="h", policy={"name": "p"}
    )
    servers = Servers(servers=(ServerLine(name="a", capacity_tokens=1000), ServerLine(name="b")))
    for one in (request, opening, servers):
        text = encode(one)
        assert text.endswith(b"\n")
        assert text.count(b"\n") == 1
        assert decode(text) == one


def test_a_field_of_a_later_version_is_ignored() -> None:
    assert decode(line(invented=1)) == decode(line())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `line`"),
        (line(line="other"), "other"),
        (line(ended_s=-1), r"ended_s"),
        (line(prompt_bytes=2**26 + 1), r"prompt_bytes"),
        (line(prompt_tokens="many"), r"prompt_tokens"),
        (line(at_unix_s=1e300), r"at_unix_s"),
        (b'{"line":"opening","policy":' + b"[" * 100_000, "."),
        (line(chunks="not base64!"), r"chunks"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_that_names_the_fault(text: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        decode(text)


def test_hashes_come_back_from_their_bytes_and_parts_of_hashes_are_refused() -> None:
    chain = [0, 1, 2**64 - 1]
    assert unpack_hashes(pack_hashes(chain)) == chain
    assert len(pack_hashes(chain)) == 24
    with pytest.raises(ValueError, match="multiple"):
        unpack_hashes(b"1234567")
