"""The cached blocks that follow one prefix, ordered by their tokens.

A prompt continues in the block that shares the longest beginning with it. This block is next to the place
where the prompt would be in the order, so a binary search finds the block among any number of blocks. Blocks
with equal tokens are side by side, ordered by their ids.

Caller: the cache of partial blocks. The cache has one list for each prefix that cached blocks follow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from model_server.core.blocks import Block
from model_server.core.request import TokenId

_Tokens = tuple[TokenId, ...]


class Beginnings:
    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[_Tokens, int, Block]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Block, _Tokens]]:
        return ((block, tokens) for tokens, _, block in self._entries)

    def add(self, tokens: _Tokens, block: Block) -> None:
        """Add a block, which must not be in the list yet. If the block's tokens change, remove the block and
        add it again.
        """
        insort(self._entries, (tokens, block.block_id, block))

    def remove(self, tokens: _Tokens, block: Block) -> None:
        at = bisect_left(self._entries, (tokens, block.block_id))
        assert self._entries[at][2] is block, "the block is not here with these tokens"
        del self._entries[at]

    def longest(self, wanted: _Tokens) -> tuple[int, Block | None]:
        """Return the number of tokens in the longest beginning that `wanted` shares with a block, and that
        block. Of several such blocks, prefer a block that ends where the shared beginning ends.
        """
        at = bisect_left(self._entries, (wanted,))
        beside = self._entries[max(0, at - 1) : at + 1]
        best = max((_common(tokens, wanted) for tokens, _, _ in beside), default=0)
        if not best:
            return 0, None
        return best, self._entries[bisect_left(self._entries, (wanted[:best],))][2]

    def check_integrity(self) -> None:
        keys = [(tokens, block_id) for tokens, block_id, _ in self._entries]
        assert keys == sorted(set(keys)), "the entries are out of order, or a block is listed twice"
        assert all(block.block_id == block_id for _, block_id, block in self._entries)


def _common(left: Sequence[TokenId], right: Sequence[TokenId]) -> int:
    """Return the number of leading tokens that `left` and `right` have in common."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
