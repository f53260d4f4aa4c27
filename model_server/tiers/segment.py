"""One radix node's KV as a file: probed keys of all tokens in logical order, the rest in chunks in stored order.

    magic, length and CRC of the description
    description: JSON (block hashes, place in the tree), mapping lists (16 bits a token and layer), CRC of each chunk
    for each layer: the probed keys, one chunk; then chunks of `chunk_tokens` tokens with the other keys and all values

A file is written whole under a temporary name, synced, and renamed: under its final name it is complete. A reader holds the file
open, so one that is replaced meanwhile stays readable as it was. What is cut off or altered is noticed by length or CRC.

Callers: the store.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from model_server.core.hashing import BlockHash
from model_server.tiers.disk import Disk
from model_server.tiers.errors import DamagedSegmentError
from model_server.tiers.layout import TokenOrder

SUFFIX = ".kv"
UNFINISHED = ".unfinished"
_MAGIC = b"PGKVSEG1"
_PREAMBLE = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What one token's record is; a store holds records of one layout."""

    model: str
    """Whose KV it is: a name or a fingerprint of its weights."""
    dtype: str
    num_layers: int
    probe_bytes: int
    """Of one token and layer: keys of the probed KV heads."""
    rest_bytes: int
    """Of one token and layer: the other keys, then the values."""
    block_tokens: int
    chunk_tokens: int

    def num_chunks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk_tokens)

    def chunk_bytes(self, chunk: int, *, num_tokens: int) -> int:
        return min(self.chunk_tokens, num_tokens - chunk * self.chunk_tokens) * self.rest_bytes

    def data_bytes(self, num_tokens: int) -> int:
        return self.num_layers * num_tokens * (self.probe_bytes + self.rest_bytes)


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """One layer's records of some tokens, in logical order."""

    probe: bytes
    rest: bytes

    def part(self, layout: KvLayout, start: int, end: int) -> LayerRecords:
        return LayerRecords(
            self.probe[start * layout.probe_bytes : end * layout.probe_bytes],
            self.rest[start * layout.rest_bytes : end * layout.rest_bytes],
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the tree a segment belongs."""

    hashes: tuple[BlockHash, ...]
    first_block: int
    parent: BlockHash | None
    """The last block before its own."""


def write(
    path: Path, layout: KvLayout, place: Place, layers: Sequence[LayerRecords], orders: Sequence[TokenOrder]
) -> int:
    """Write or replace the segment at once. Gives its size in bytes."""
    chunks = [
        chunk
        for records, order in zip(layers, orders, strict=True)
        for chunk in _chunks(layout, records, order)
    ]
    described = _describe(layout, place, orders, [zlib.crc32(chunk) for chunk in chunks])
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(_PREAMBLE.pack(_MAGIC, len(described), zlib.crc32(described)))
            file.write(described)
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        unfinished.rename(path)
    except OSError:
        with suppress(
            OSError
        ):  # a full disk needs the room back; what stays goes when the store is opened next
            unfinished.unlink()
        raise
    sync_folder(path.parent)
    return size_bytes


def sync_folder(folder: Path) -> None:
    """Names that were given or taken in it last."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Segment:
    """A complete segment file, open for reading. Threads may read it together."""

    def __init__(self, path: Path, layout: KvLayout, disk: Disk) -> None:
        """DamagedSegmentError: it is not what a writer of this layout leaves behind."""
        self.path = path
        self._layout = layout
        self._disk = disk
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._read_description()
        except (ValueError, KeyError, TypeError, AssertionError, struct.error) as error:
            self.close()
            raise DamagedSegmentError(f"{path} is cut off or altered: {error}") from error
        except BaseException:
            self.close()
            raise

    def probe(self, layer: int) -> bytes:
        """Probed keys of all tokens, in logical order: one read."""
        offset = self._data + layer * self._layer_bytes
        number = layer * (1 + self._layout.num_chunks(self.num_tokens))
        return self._checked(number, offset, self.num_tokens * self._layout.probe_bytes)

    def chunk(self, layer: int, chunk: int) -> bytes:
        """One chunk in stored order: one read."""
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
        """All of one layer, in logical order again."""
        chunks = range(self._layout.num_chunks(self.num_tokens))
        stored = b"".join([self.chunk(layer, chunk) for chunk in chunks])
        rest = self.orders[layer].unpack(stored, record_bytes=self._layout.rest_bytes)
        return LayerRecords(self.probe(layer), rest)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def check_integrity(self) -> None:
        """Reads everything. DamagedSegmentError where bytes are not those that were written."""
        for order in self.orders:
            order.check_integrity()
        for layer in range(self._layout.num_layers):
            self.layer(layer)

    def _read_description(self) -> None:
        magic, length, checksum = _PREAMBLE.unpack(os.pread(self._file, _PREAMBLE.size, 0))
        described = os.pread(self._file, length, _PREAMBLE.size)
        if magic != _MAGIC or len(described) != length or zlib.crc32(described) != checksum:
            raise ValueError("its description does not fit its checksum")
        text, _, numbers = described.partition(b"\n")
        told = json.loads(text)
        parent = BlockHash(bytes.fromhex(told["parent"])) if told["parent"] else None
        hashes = tuple(BlockHash(bytes.fromhex(block)) for block in told["hashes"])
        self.place = Place(hashes, told["first_block"], parent)
        layout = self._layout
        if told["layout"] != asdict(layout):
            raise ValueError("it has another layout than its store")
        self.num_tokens = len(hashes) * layout.block_tokens
        slots_bytes = 2 * layout.num_layers * self.num_tokens
        slots = _from_little("H", numbers[:slots_bytes])
        self.orders = [
            TokenOrder(tuple(slots[layer * self.num_tokens : (layer + 1) * self.num_tokens]))
            for layer in range(layout.num_layers)
        ]
        self._checksums = _from_little("I", numbers[slots_bytes:])
        self._data = _PREAMBLE.size + length
        self._layer_bytes = self.num_tokens * (layout.probe_bytes + layout.rest_bytes)
        self.size_bytes = self._data + layout.data_bytes(self.num_tokens)
        if os.fstat(self._file).st_size != self.size_bytes:
            raise ValueError(f"{self.size_bytes} bytes are wanted")

    def _checked(self, number: int, offset: int, num_bytes: int) -> bytes:
        content = self._disk.read(self._file, offset=offset, num_bytes=num_bytes)
        if len(content) != num_bytes or zlib.crc32(content) != self._checksums[number]:
            raise DamagedSegmentError(f"{self.path}: chunk {number} does not fit its checksum")
        return content


def _chunks(layout: KvLayout, records: LayerRecords, order: TokenOrder) -> list[bytes]:
    stored = order.pack(records.rest, record_bytes=layout.rest_bytes)
    size = layout.chunk_tokens * layout.rest_bytes
    return [records.probe, *(stored[start : start + size] for start in range(0, len(stored), size))]


def _describe(
    layout: KvLayout, place: Place, orders: Sequence[TokenOrder], checksums: Sequence[int]
) -> bytes:
    told = {
        "layout": asdict(layout),
        "hashes": [block.hex() for block in place.hashes],
        "first_block": place.first_block,
        "parent": place.parent.hex() if place.parent else None,
    }
    slots = array("H", [slot for order in orders for slot in order.slots])
    return json.dumps(told).encode() + b"\n" + _to_little(slots) + _to_little(array("I", checksums))


def _to_little(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _from_little(code: str, content: bytes) -> array[int]:
    numbers: array[int] = array(code)
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
