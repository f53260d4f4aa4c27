"""Reads traces in the format that Mooncake published: JSON lines with `timestamp` (ms), `input_length`,
`output_length` and `hash_ids`.

Each id stands for 512 tokens of the prompt and for everything before them. The last block may be short. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from epp.tools.replay.tempo import MOST_RECORDED_TOKENS
from epp.tools.replay.trace import Call, Piece, ReplayError

BLOCK_TOKENS: Final = 512
_BYTES_PER_TOKEN: Final = 4


class _Row(Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0, le=2**53)]
    input_length: Annotated[int, Meta(ge=0, le=2**24)]
    output_length: Annotated[int, Meta(ge=0, le=MOST_RECORDED_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=2**62)]]


_DECODER: Final = msgspec.json.Decoder(_Row)


def is_one(text: bytes) -> bool:
    """Return whether the file is such a trace, by its first line."""
    return b'"hash_ids"' in text.lstrip().split(b"\n", 1)[0]


def parse(text: bytes, *, name: str) -> Iterator[Call]:
    """Yield the calls, in the order of the file. A ReplayError names the line at fault."""
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            raise ReplayError(f"{name}, line {number}: {error}") from error
        if not row.input_length or len(row.hash_ids) != -(-row.input_length // BLOCK_TOKENS):
            raise ReplayError(
                f"{name}, line {number}: {len(row.hash_ids)} blocks of {BLOCK_TOKENS} tokens are not {row.input_length} tokens"
            )
        yield _call_of(row)


def _call_of(row: _Row) -> Call:
    pieces = []
    left = row.input_length
    for block in row.hash_ids:
        tokens = min(BLOCK_TOKENS, left)
        pieces.append(Piece(block, tokens * _BYTES_PER_TOKEN, tokens))
        left -= tokens
    return Call(at_s=row.timestamp / 1000, pieces=tuple(pieces), output_tokens=max(1, row.output_length))
