"""Keeps the blocks that one server holds, by its own events. Copies are counted for each tier.

A server stores equal blocks twice when equal requests run side by side, and sends an event for each copy that
it removes. A block that moves to a slower tier is stored there before or after it leaves the faster tier. So
a block is held while any copy of it is held, in whatever tier. Removals of unknown copies (from before we
listened) are ignored.

Pure. Callers: `knowledge`, which bounds it, and `chunks`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

from epp.sources.kvevents.block_hashes import BlockName
from epp.sources.kvevents.decoding import Cleared, Event, Removed, Stored, Tier

_BITS: Final = 10
"""Bits of each tier's count. With usual counts the integer is small, and Python shares small integers."""
_MOST: Final = (1 << _BITS) - 1
_V = TypeVar("_V")
_PARTS: Final = 64
_SHIFT: Final = 64 - _PARTS.bit_length() + 1
_ODD: Final = secrets.randbits(63) << 1 | 1


class ByBlock(Generic[_V]):
    """A dictionary by block names that grows in small steps.

    A full Python dictionary moves all its entries to a table twice as large, in one step. This takes 50 ms
    for 700,000 blocks and 160 ms for 1.4 million, and nothing else of the process runs meanwhile. So blocks
    are spread over many small dictionaries. Servers choose the names of blocks, so a secret number decides
    which name goes where.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: Final[list[dict[BlockName, _V]]] = [{} for _ in range(_PARTS)]

    def part(self, block: BlockName) -> dict[BlockName, _V]:
        """Return the dictionary in which the block is, if it is in any."""
        return self.parts[(block * _ODD >> _SHIFT) & (_PARTS - 1)]


class ServerBlocks:
    def __init__(self) -> None:
        self._copies = ByBlock[int]()
        """For each block, the counts of its copies in all tiers, in one integer that is never 0."""
        self._held = 0
        self._partial_groups: set[int] = set()
        """Groups of layers that keep only a part of a prompt. Their blocks say nothing about prefixes."""

    def __len__(self) -> int:
        return self._held

    def __contains__(self, block: BlockName) -> bool:
        return block in self._copies.part(block)

    def hold(self, blocks: Iterable[BlockName]) -> bool:
        part = self._copies.part
        return all(block in part(block) for block in blocks)

    def apply(self, event: Event) -> Iterable[BlockName]:
        """Take in one event. Returns the blocks that came or went. The caller must read all of them: see
        `clear`.
        """
        match event:
            case Stored():
                return self._stored(event)
            case Removed():
                return self._removed(event)
            case Cleared():
                return self.clear()

    def clear(self) -> Iterator[BlockName]:
        """Let all blocks go, each when the caller has taken the block before. The caller must read to the
        end.

        Freeing a million blocks in one step would hold the interpreter for 30 ms.
        """
        for copies in self._copies.parts:
            while copies:
                self._held -= 1
                yield copies.popitem()[0]
            copies.clear()

    def _stored(self, event: Stored) -> list[BlockName]:
        if event.partial_attention:
            self._partial_groups.add(event.group)
            return []
        changed, shift, part = [], _BITS * event.tier, self._copies.part
        for block in event.blocks:
            copies = part(block)
            had = copies.get(block, 0)
            if had >> shift & _MOST == _MOST:
                # So many copies of one block are an error of the sender. The count must not overflow into the
                # count of the next tier.
                continue
            copies[block] = had + (1 << shift)
            if not had:
                self._held += 1
                changed.append(block)
        return changed

    def _removed(self, event: Removed) -> list[BlockName]:
        if event.group in self._partial_groups:
            return []
        changed, shift, part = [], _BITS * event.tier, self._copies.part
        for block in event.blocks:
            copies = part(block)
            had = copies.get(block, 0)
            if not had >> shift & _MOST:
                continue
            copies[block] = had - (1 << shift)
            if not copies[block]:
                del copies[block]
                self._held -= 1
                changed.append(block)
        return changed

    def check_integrity(self) -> None:
        assert self._held == sum(map(len, self._copies.parts))
        for part in self._copies.parts:
            assert all(0 < copies < 1 << _BITS * len(Tier) for copies in part.values())
            assert all(self._copies.part(block) is part for block in part)
