"""Defines the three kinds of JSON lines of a recording. No line has text of a prompt, an answer or a header.

A recording begins with a `recording` line, which says how prompts were cut into chunks and which policy
routed. A `servers` line describes the fleet from then on. A `request` line describes one request that has
ended. Prompts appear as the keyed hashes of their chunks: equal hashes mean equal beginnings, and nothing
else can be read from them. Tenants appear as keyed hashes too.

Pure. `recorder` makes the lines, and `replay` reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

VERSION: Final = 1
MOST_PROMPT_BYTES: Final = 2**26
"""No gateway accepts a larger body."""
_ChunkBytes = Annotated[int, Meta(ge=1, le=2**24)]
_Bytes = Annotated[int, Meta(ge=0, le=MOST_PROMPT_BYTES)]
_Tokens = Annotated[int, Meta(ge=0, le=2**30)]
_UnixSeconds = Annotated[float, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=2**31)]


class Opening(Struct, frozen=True, tag_field="line", tag="recording", kw_only=True):
    """How the picker cut and routed the requests that follow."""

    version: int = VERSION
    chunk_bytes: _ChunkBytes
    later_chunk_bytes: _ChunkBytes
    later_from_bytes: Annotated[int, Meta(ge=0, le=2**32)]
    hashing: str
    """Names the schedule and the secret of the hashes. Hashes can be compared only if these are equal."""
    policy: dict[str, Any]
    """The policy, as `epp check` prints it."""


class ServerLine(Struct, frozen=True, kw_only=True):
    """One endpoint, as far as the picker knew it."""

    name: str
    model: str = ""
    capacity_tokens: Annotated[int, Meta(ge=0, le=2**36)] | None = None
    prefill_tokens_per_s: Annotated[float, Meta(ge=0, le=2**31)] | None = None


class Servers(Struct, frozen=True, tag_field="line", tag="servers", kw_only=True):
    """The fleet from this line on."""

    servers: Annotated[tuple[ServerLine, ...], Meta(max_length=4096)]


class RecordedRequest(Struct, frozen=True, tag_field="line", tag="request", kw_only=True, omit_defaults=True):
    """One request that has ended. Times are seconds; `at_unix_s` is the moment of the pick."""

    at_unix_s: _UnixSeconds
    waited_s: _Seconds = 0.0
    """How long flow control had held the request."""
    kind: str
    base_model: str = ""
    adapter: str = ""
    tenant: str = ""
    """A keyed hash. Empty: no tenant was named."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] = 0
    stream: bool = False
    prompt_bytes: _Bytes
    prompt_tokens: _Tokens
    """The picker's estimate."""
    matched_tokens: _Tokens = 0
    reason: str
    server: str
    """The server that really served the request, if known."""
    outcome: str
    status: int | None = None
    headers_s: _Seconds | None = None
    ended_s: _Seconds
    cached_tokens: _Tokens | None = None
    """The number that the server itself reported. This field and the next two exist only for sampled
    answers."""
    ttft_s: _Seconds | None = None
    output_tokens: _Tokens | None = None
    chunks: bytes = b""
    """The chain: eight bytes for each full chunk, little-endian. JSON shows them as base64."""


Line = Opening | Servers | RecordedRequest

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Line)


def encode(line: Line) -> bytes:
    return _ENCODER.encode(line) + b"\n"


def decode(text: bytes) -> Line:
    """A ValueError names the field at fault."""
    try:
        line: Line = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return line


def packed(chain: Sequence[int]) -> bytes:
    """Return hashes as bytes, little-endian, like every machine that this runs on. `unpacked` is the
    inverse.
    """
    return array("Q", chain).tobytes()


def unpacked(chunks: bytes) -> list[int]:
    """Return the hashes in the bytes. Raises ValueError if they are not whole hashes."""
    hashes = array("Q")
    hashes.frombytes(chunks)
    return hashes.tolist()
