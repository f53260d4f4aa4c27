"""The queue of free blocks with cached content. The block that joined first is evicted first, and a hit takes
a block out of the middle, in O(1), since the queue is a doubly linked list (docs/decisions/0101).

Invariant (`check_integrity`): iteration gives each free block once, in the order of eviction, and `len`
counts the free blocks.

Callers: the block pool.
"""

from collections.abc import Iterator
from typing import Protocol

from model_server.core.blocks import Block, BlockId


class FreeOrder(Protocol):
    """An order of eviction, as the pool uses it: a queue or a policy."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """Yield the free blocks in order of eviction, without a change."""
        ...

    def append(self, block: Block) -> None:
        """Add a block that became free. The block's `last_use`, `uses` and `prefix_blocks` are up to date.
        The last block of a sequence is appended first.
        """
        ...

    def remove(self, block: Block) -> None:
        """Take out a block that is in use again, because it was hit."""
        ...

    def pop_first(self) -> Block:
        """Take out the block to evict."""
        ...

    def check_integrity(self) -> None: ...


class LinkedQueue:
    """The links are fields of the blocks, so nothing is allocated when a block joins or leaves."""

    __slots__ = ("_ends", "_length")

    def __init__(self) -> None:
        self._ends = Block(BlockId(-1))
        self._ends.before = self._ends.after = self._ends
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.after
        while block is not self._ends:
            assert block is not None
            yield block
            block = block.after

    def append(self, block: Block) -> None:
        assert block.before is None, "the block is in the queue already"
        last = self._ends.before
        assert last is not None
        block.before, block.after = last, self._ends
        last.after = self._ends.before = block
        self._length += 1

    def remove(self, block: Block) -> None:
        before, after = block.before, block.after
        assert before is not None, "the block is not in the queue"
        assert after is not None, "the block is not in the queue"
        before.after, after.before = after, before
        block.before = block.after = None
        self._length -= 1

    def pop_first(self) -> Block:
        first = self._ends.after
        assert first is not None
        assert first is not self._ends, "no free block is left"
        self.remove(first)
        return first

    def check_integrity(self) -> None:
        blocks = list(self)
        assert len(blocks) == len(set(blocks)) == self._length
        assert all(block.after is not None and block.after.before is block for block in blocks)
