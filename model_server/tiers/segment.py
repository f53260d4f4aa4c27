"""Keeps one radix node's KV as a file. The file holds the probed keys of all tokens in logical order, and all
other keys and values in chunks in stored order.

    magic, length and CRC of the description
    description: JSON (block hashes, place in the tree), mapping lists (16 bits a token and layer), CRC of
    each chunk
    for each layer: the probed keys, one chunk; then chunks of `chunk_tokens` tokens with the other keys and
    all values

A file is written whole, and a file that has its final name is complete. Length and CRC show whether a file
was cut off or altered. A file that another program wrote is refused if its values do not fit. A segment that
was replaced can still be read in its old state while its file is open. After that, a read raises
`DamagedSegmentError`, and the reader computes the prefix.

Callers: the store.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_server.core.hashing import BlockHash
from model_server.tiers.errors import DamagedSegmentError
from model_server.tiers.files import Disk, ReadFile, write_whole
from model_server.tiers.layout import TokenOrder

SUFFIX = ".kv"
MAX_TOKENS = 1 << 16
"""The most tokens of one node, because a place in a mapping list has 16 bits."""
_MAGIC = b"PGKVSEG1"
_PREAMBLE = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The layout of one token's record. A store holds records of one layout."""

    model: str
    """The model of the KV: a name or a fingerprint of its weights."""
    dtype: str
    num_layers: int
    probe_bytes: int
    """The bytes of one token in one layer for the keys of the probed KV heads."""
    rest_bytes: int
    """The bytes of one token in one layer for the other keys, then the values."""
    block_tokens: int
    chunk_tokens: int

    def num_chunks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk_tokens)

    def chunk_bytes(self, chunk: int, *, num_tokens: int) -> int:
        return min(self.chunk_tokens, num_tokens - chunk * self.chunk_tokens) * self.rest_bytes

    def data_bytes(self, num_tokens: int) -> int:
        return self.num_layers * num_tokens * (self.probe_bytes + self.rest_bytes)

    def described_bytes(self, num_blocks: int) -> int:
        """Return an upper bound of the bytes that stand before the data of this many blocks."""
        num_tokens = num_blocks * self.block_tokens
        layer_bytes = 2 * num_tokens + 4 * (self.num_chunks(num_tokens) + 1)
        return 2048 + 80 * num_blocks + self.num_layers * layer_bytes


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """The records of some tokens in one layer, in logical order."""

    probe: bytes
    rest: bytes

    def part(self, layout: KvLayout, start: int, end: int) -> LayerRecords:
        return LayerRecords(
            self.probe[start * layout.probe_bytes : end * layout.probe_bytes],
            self.rest[start * layout.rest_bytes : end * layout.rest_bytes],
        )


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a segment in the tree."""

    hashes: tuple[BlockHash, ...]
    first_block: int
    parent: BlockHash | None
    """The hash of the last block before the segment's own."""


def write(
    path: Path, layout: KvLayout, place: Place, layers: Sequence[LayerRecords], orders: Sequence[TokenOrder]
) -> None:
    """Write or replace the segment at once. Raise OSError if the disk fails."""
    chunks = [
        chunk
        for records, order in zip(layers, orders, strict=True)
        for chunk in _chunks(layout, records, order)
    ]
    described = _describe(layout, place, orders, [zlib.crc32(chunk) for chunk in chunks])
    preamble = _PREAMBLE.pack(_MAGIC, len(described), zlib.crc32(described))
    write_whole(path, (preamble, described, *chunks))


class Segment:
    """A complete segment file. Several threads may read it."""

    def __init__(self, path: Path, layout: KvLayout, disk: Disk) -> None:
        """Open the segment. Raise DamagedSegmentError if no writer of this layout made it, and OSError if the
        disk fails.
        """
        self.path = path
        self._layout = layout
        self._disk = disk
        self._file = ReadFile(path, disk.files)
        self.size_bytes = self._file.size_bytes
        self.written_ns = self._file.written_ns
        try:
            self._read_description()
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            AssertionError,
            RecursionError,
            struct.error,
        ) as error:
            raise DamagedSegmentError(f"{path} is cut off or altered: {error}") from error
        except OSError as error:
            if error.errno == errno.EIO:
                raise DamagedSegmentError(f"{path} cannot be read: {error}") from error
            raise

    def probe(self, layer: int) -> bytes:
        """Return the probed keys of all tokens, in logical order, by one read."""
        offset = self._data + layer * self._layer_bytes
        number = layer * (1 + self._layout.num_chunks(self.num_tokens))
        return self._checked(number, offset, self.num_tokens * self._layout.probe_bytes)

    def chunk(self, layer: int, chunk: int) -> bytes:
        """Return one chunk in stored order, by one read."""
        layout = self._layout
        offset = (
            self._data
            + layer * self._layer_bytes
            + self.num_tokens * layout.probe_bytes
            + chunk * layout.chunk_tokens * layout.rest_bytes
        )
        number = layer * (1 + layout.num_chunks(self.num_tokens)) + 1 + chunk
        return self._checked(number, offset, layout.chunk_bytes(chunk, num_tokens=self.num_tokens))

    def layer(self, layer: int) -> LayerRecords:
        """Return all records of one layer, in logical order."""
        chunks = range(self._layout.num_chunks(self.num_tokens))
        stored = b"".join([self.chunk(layer, chunk) for chunk in chunks])
        rest = self.orders[layer].unpack(stored, record_bytes=self._layout.rest_bytes)
        return LayerRecords(self.probe(layer), rest)

    def is_there(self) -> bool:
        """Return whether the segment's path still leads to the same file. It does not if the segment was
        replaced or removed.
        """
        return self._file.is_there()

    def check_integrity(self) -> None:
        """Read all chunks. Raise DamagedSegmentError if bytes were changed."""
        for order in self.orders:
            order.check_integrity()
        for layer in range(self._layout.num_layers):
            self.layer(layer)

    def _read_description(self) -> None:
        """Read the description. Accept only values that fit the layout, the file's size and each other."""
        number = self._file.handle().number
        magic, length, checksum = _PREAMBLE.unpack(os.pread(number, _PREAMBLE.size, 0))
        if magic != _MAGIC or length > min(
            self.size_bytes, self._layout.described_bytes(MAX_TOKENS // self._layout.block_tokens)
        ):
            raise ValueError("it does not begin like a segment")
        described = os.pread(number, length, _PREAMBLE.size)
        if len(described) != length or zlib.crc32(described) != checksum:
            raise ValueError("its description does not fit its checksum")
        text, _, numbers = described.partition(b"\n")
        self.place = _place(json.loads(text), self._layout)
        self.num_tokens = len(self.place.hashes) * self._layout.block_tokens
        self._read_numbers(numbers)
        self._data = _PREAMBLE.size + length
        self._layer_bytes = self.num_tokens * (self._layout.probe_bytes + self._layout.rest_bytes)
        wanted = self._data + self._layout.data_bytes(self.num_tokens)
        if self.size_bytes != wanted:
            raise ValueError(f"it should have {wanted} bytes, but has {self.size_bytes}")

    def _read_numbers(self, numbers: bytes) -> None:
        """Read the mapping lists, then the checksums. All layers in logical order share one list, which is
        the only list of most nodes.
        """
        layout, logical = self._layout, TokenOrder.logical(self.num_tokens)
        row = 2 * self.num_tokens
        self.orders = []
        for start in range(0, layout.num_layers * row, row):
            order = TokenOrder(tuple(array("H", numbers[start : start + row])))
            if order == logical:
                order = logical
            else:
                order.check_integrity()
            self.orders.append(order)
        self._checksums = array("I", numbers[layout.num_layers * row :])
        if len(self._checksums) != layout.num_layers * (1 + layout.num_chunks(self.num_tokens)):
            raise ValueError("the number of checksums is not the number of chunks")

    def _checked(self, number: int, offset: int, num_bytes: int) -> bytes:
        handle = self._file.handle()
        content = self._disk.read(handle.number, offset=offset, num_bytes=num_bytes)
        if len(content) != num_bytes or zlib.crc32(content) != self._checksums[number]:
            raise DamagedSegmentError(f"{self.path}: chunk {number} does not fit its checksum")
        return content


def _place(description: Any, layout: KvLayout) -> Place:
    """Return the place in a description. Raise ValueError, KeyError or TypeError if it is not the place of a
    segment of this layout.
    """
    if description["layout"] != asdict(layout):
        raise ValueError("it has another layout than its store")
    hashes = tuple(BlockHash(bytes.fromhex(block)) for block in description["hashes"])
    first_block, parent = description["first_block"], description["parent"]
    if not hashes or len(set(hashes)) != len(hashes) or not all(hashes):
        raise ValueError("it has no blocks, or names a block twice")
    if not isinstance(first_block, int) or (first_block > 0) != (parent is not None):
        raise ValueError("its first block and its parent contradict each other")
    return Place(hashes, first_block, None if parent is None else BlockHash(bytes.fromhex(parent)))


def _chunks(layout: KvLayout, records: LayerRecords, order: TokenOrder) -> list[bytes]:
    stored = order.pack(records.rest, record_bytes=layout.rest_bytes)
    size = layout.chunk_tokens * layout.rest_bytes
    return [records.probe, *(stored[start : start + size] for start in range(0, len(stored), size))]


def _describe(
    layout: KvLayout, place: Place, orders: Sequence[TokenOrder], checksums: Sequence[int]
) -> bytes:
    description = {
        "layout": asdict(layout),
        "hashes": [block.hex() for block in place.hashes],
        "first_block": place.first_block,
        "parent": place.parent.hex() if place.parent else None,
    }
    slots = array("H", [slot for order in orders for slot in order.slots])
    return json.dumps(description).encode() + b"\n" + slots.tobytes() + array("I", checksums).tobytes()
