"""What a recording holds: JSON lines of three kinds, without any text of a prompt, an answer or a header.

A recording opens with a `recording` line, which says how prompts were cut into chunks and which policy
routed. A `servers` line describes the fleet from then on. A `request` line describes one request that is
over. Prompts appear as the keyed hashes of their chunks: equal hashes mean equal beginnings, and nothing else
can be read from them. Tenants appear as keyed hashes too.

Pure. `recorder` makes the lines, and `replay` reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

VERSION: Final = 1


class Opening(Struct, frozen=True, tag_field="line", tag="recording", kw_only=True):
    """How the requests that follow were cut and routed."""

    version: int = VERSION
    chunk_bytes: int
    later_chunk_bytes: int
    later_from_bytes: int
    hashing: str
    """Names schedule and secret of the hashes. Hashes compare only where this is equal."""
    policy: dict[str, Any]
    """As `epp check` prints a policy."""


class Server(Struct, frozen=True, kw_only=True):
    """One endpoint, as far as the picker knew it."""

    name: str
    model: str = ""
    capacity_tokens: int | None = None
    prefill_tokens_per_s: float | None = None


class Servers(Struct, frozen=True, tag_field="line", tag="servers", kw_only=True):
    """The fleet from now on."""

    servers: tuple[Server, ...]


class Asked(Struct, frozen=True, tag_field="line", tag="request", kw_only=True, omit_defaults=True):
    """One request that is over. Times are seconds; `at_unix_s` is the moment of the pick."""

    at_unix_s: float
    waited_s: float = 0.0
    """How long flow control had held it before."""
    kind: str
    base_model: str = ""
    adapter: str = ""
    tenant: str = ""
    """A keyed hash. Empty: none was named."""
    priority: int = 0
    stream: bool = False
    prompt_bytes: int
    prompt_tokens: int
    """The picker's estimate."""
    matched_tokens: int = 0
    reason: str
    server: str
    """Who really served it, where that is known."""
    outcome: str
    status: int | None = None
    headers_s: float | None = None
    ended_s: float
    cached_tokens: int | None = None
    """By the server's own account, as the two below, in sampled answers alone."""
    ttft_s: float | None = None
    output_tokens: int | None = None
    chunks: bytes = b""
    """The chain: eight bytes for each full chunk, little-endian. JSON shows them as base64."""


Line = Opening | Servers | Asked

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Line)


def encode(line: Line) -> bytes:
    return _ENCODER.encode(line) + b"\n"


def decode(text: bytes) -> Line:
    """ValueError names the field at fault."""
    line: Line = _DECODER.decode(text)
    return line


def packed(chain: Sequence[int]) -> bytes:
    """Little-endian on every machine that this runs on; `unpacked` is its inverse."""
    return array("Q", chain).tobytes()


def unpacked(chunks: bytes) -> list[int]:
    """ValueError where these are no whole hashes."""
    hashes = array("Q")
    hashes.frombytes(chunks)
    return hashes.tolist()
