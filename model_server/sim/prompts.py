"""Prompts of simulated requests: their segments, their text, and the names of their cache blocks.

A prompt is a sequence of segments (id, tokens). Equal ids in equal order give equal text. So prompts share
text by sharing segments, and no text of 48 KB has to be kept for each request: text is rendered when the
request arrives. Block names are a chained hash over that text, cut every `block_tokens`, so two prompts share
a block exactly when all text before the block is equal too. This module does no I/O. Callers: the simulated
fleet, and routers that want the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from model_server.core.hashing import BlockHash

_TOKEN_BYTES = 4
_WORD_BYTES = 8


class Segment(NamedTuple):
    """A piece of text that may occur in several prompts. A longer segment of the same id starts with the
    shorter segment.
    """

    segment_id: int
    num_tokens: int


def render(segments: Sequence[Segment], *, bytes_per_token: float = _TOKEN_BYTES) -> bytes:
    """Return the text: the id of each segment, repeated. It ends at the byte nearest to its last token."""
    text, tokens = bytearray(), 0
    for segment_id, num_tokens in segments:
        tokens += num_tokens
        size = round(tokens * bytes_per_token) - len(text)
        text += (segment_id.to_bytes(_WORD_BYTES, "little") * (size // _WORD_BYTES + 1))[:size]
    return bytes(text)


def block_names(segments: Sequence[Segment], *, block_tokens: int, root: str = "") -> list[BlockHash]:
    """Return the names of all full blocks. `root` (adapter, salt) keeps chains of different roots apart."""
    size = block_tokens * _TOKEN_BYTES
    view = memoryview(render(segments))
    seed = xxh3_64_intdigest(root.encode())
    names = []
    for start in range(0, len(view) - size + 1, size):
        piece = view[start : start + size]
        names.append(BlockHash(xxh3_64_digest(piece, seed)))
        seed = xxh3_64_intdigest(piece, seed)
    return names
