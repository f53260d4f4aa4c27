"""A dictionary by block names that grows in small steps.

When a Python dictionary is full, it moves to one twice as large in one step. This takes 50 ms for 700,000
blocks and 160 ms for 1.4 million, and nothing else of the process runs meanwhile. So blocks are spread over
many small dictionaries. Servers choose the names of blocks, so a secret number decides which name goes where.

Pure. Callers: `blocks`, `chunks`.
"""

from __future__ import annotations

import secrets
from typing import Final, Generic, TypeVar

from epp.kvevents.block_hashes import BlockName

_V = TypeVar("_V")
_PARTS: Final = 64
_SHIFT: Final = 64 - _PARTS.bit_length() + 1
_ODD: Final = secrets.randbits(63) << 1 | 1


class ByBlock(Generic[_V]):
    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: Final[list[dict[BlockName, _V]]] = [{} for _ in range(_PARTS)]

    def part(self, block: BlockName) -> dict[BlockName, _V]:
        """The dictionary in which the block is, if it is in any."""
        return self.parts[(block * _ODD >> _SHIFT) & (_PARTS - 1)]
