"""Writes a picker's table as bytes, for pickers that start later, and reads such bytes: the chains of every
endpoint, from the least to the most recently used.

The bytes are made and read in portions, so that picks go on between them. The part of each endpoint shows one
consistent moment. A beginning that chains of a portion have in common is written once. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from epp.base.types import EndpointName
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import PrefixTable, Run
from epp.sources.sharing.batches import (
    FORMAT,
    MOST_CHUNKS,
    MalformedBatchError,
    Name,
    Process,
    pack_hashes,
    unpack_hashes,
)
from epp.sources.sharing.speaker import identity_of

_PORTION_USES: Final = 200
_PORTION_CHUNKS: Final = 2**15
"""Most uses of one portion, and about its most chunks. A portion takes a few milliseconds to write and to
load."""
_MOST_USES: Final = 8_192
_MOST_READ_CHUNKS: Final = 2**17
"""Most uses and chunks of a portion that is read."""
_MOST_PORTIONS: Final = 65_536
MOST_TABLE_BYTES: Final = 128 * 2**20
_MOST_BYTES: Final = 2**50
"""Largest cache of one server."""

_Bytes = Annotated[int, Meta(ge=0, le=_MOST_BYTES)]
_Place = Annotated[int, Meta(ge=0, le=MOST_CHUNKS)]
WrittenUse = tuple[_Place, _Place, bytes, _Bytes]
"""A chain: the number of an earlier use of the portion, how many chunks the chain has in common with it, and
its further chunks. Without a chain: a number of bytes whose prompt is not known."""


class Portion(msgspec.Struct, array_like=True, frozen=True):
    """Some uses of one endpoint's cache."""

    server: Name
    process: Process
    capacity_bytes: _Bytes
    """Capacity of the endpoint's mirror."""
    prompt_tokens: Annotated[float, Meta(ge=0, le=1e20)] | None
    """The endpoint's counter of prompt tokens when the table was stored."""
    uses: Annotated[list[WrittenUse], Meta(max_length=_MOST_USES)]

    def read_uses(self) -> Iterator[tuple[list[int], int]]:
        """Yield each use as a chain, or as an empty one and a number of bytes. Raises MalformedBatchError."""
        chains: list[list[int]] = []
        spent = 0
        for earlier, shared, tail, size_bytes in self.uses:
            if shared and earlier >= len(chains):
                raise MalformedBatchError("a chain continues one that does not stand before it")
            chain = (chains[earlier][:shared] if shared else []) + unpack_hashes(tail)
            spent += len(chain)
            if len(chain) > MOST_CHUNKS or spent > _MOST_READ_CHUNKS:
                raise MalformedBatchError("a portion of a table names too many chunks")
            chains.append(chain)
            yield chain, size_bytes


class _StoredTable(msgspec.Struct, array_like=True, frozen=True):
    portions: Annotated[list[msgspec.Raw], Meta(max_length=_MOST_PORTIONS)]
    """Views of the bytes of the table, since a table may be large."""


_encoder = msgspec.msgpack.Encoder()
_table_decoder = msgspec.msgpack.Decoder(_StoredTable)
_portion_decoder = msgspec.msgpack.Decoder(Portion)


def encode_table(portions: Sequence[bytes]) -> bytes:
    return _encoder.encode([[msgspec.Raw(portion) for portion in portions]])


def decode_table(data: bytes | memoryview) -> Iterator[Portion]:
    """Yield the portions of a stored table, one decoded at each step. Raises MalformedBatchError."""
    if len(data) > MOST_TABLE_BYTES:
        raise MalformedBatchError(f"a stored table of {len(data)} bytes is too long")
    try:
        for portion in _table_decoder.decode(data).portions:
            yield _portion_decoder.decode(portion)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBatchError(f"not a stored table of format {FORMAT}: {error}") from error


def table_portions(picker: Picker) -> Iterator[bytes]:
    """Yield the portions of a stored table, in order. Other work may run between them."""
    for state in list(picker.fleet.states()):
        name, table = state.endpoint.name, picker.table
        if picker.fleet.get(name) is not state:
            continue
        uses, of_server = (
            uses_of(table, name),
            Portion(
                server=name,
                process=identity_of(state),
                capacity_bytes=min(_MOST_BYTES, table.mirrors[name].capacity_bytes),
                prompt_tokens=state.metrics.prompt_tokens if state.metrics else None,
                uses=[],
            ),
        )
        portion = _next_uses(uses)
        while True:
            yield _encoder.encode(msgspec.structs.replace(of_server, uses=portion))
            portion = _next_uses(uses)
            if not portion:
                break


def _next_uses(uses: Iterator[tuple[Sequence[int], int]]) -> list[WrittenUse]:
    """Return the uses of one portion. Empty: there are no more."""
    written: list[WrittenUse] = []
    first_with: dict[int, int] = {}
    """For each chunk of this portion, the number of the first use that has it. Every chunk before it in its
    chain is there too, so bisection finds the last known one."""
    chunks = 0
    for whole, size_bytes in uses:
        chain = whole[:MOST_CHUNKS]
        known = bisect_left(chain, 1, key=lambda chunk: chunk not in first_with)
        earlier = first_with[chain[known - 1]] if known else 0
        first_with.update(dict.fromkeys(chain[known:], len(written)))
        written.append((earlier, known, pack_hashes(chain[known:]), min(_MOST_BYTES, size_bytes)))
        chunks += len(chain)
        if len(written) >= _PORTION_USES or chunks >= _PORTION_CHUNKS:
            break
    return written


def uses_of(table: PrefixTable, name: EndpointName) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the calls of `record` and `charge` that would make the server's mirror again, the oldest first: a
    chain, or a number of bytes without a chain.

    The table may change between steps. Entries that are gone by then are left out, and new ones do not
    appear.
    """
    mirror = table.taking(name)
    for use in list(mirror.uses()) if mirror is not None else ():
        if use.leaf is None:
            yield (), use.size_bytes
        elif mirror is not None and mirror.last_use.get(use.leaf) is use:
            yield _whole_chain(use.leaf), 0


def _whole_chain(run: Run | None) -> array[int]:
    """Return the hashes from the chain's first chunk to the run's last."""
    parts = []
    while run is not None:
        parts.append(run.hashes)
        run = run.parent
    whole = array("Q")
    for part in reversed(parts):
        whole += part
    return whole
