"""The queue of free blocks with cached content. The block that joined first is evicted first, and a hit takes
a block out of the middle. Three classes of one protocol take blocks out of the middle in different ways. The
micro-benchmark compares them (docs/bench-caching.md):
- `LinkedQueue`: a doubly linked list removes the block at once, in O(1);
- `LazyQueue`: a hit only marks the block, and marked blocks are skipped when they come to the front. A marked
  block that is freed again has to leave its old place first, which is O(n);
- `DeferredQueue`: a hit only marks the block. A separate thread removes the marked blocks after each step, in
  O(n), while the model computes.

Invariant (`check_integrity`): iteration gives each free block once, in the order of eviction, and `len`
counts the free blocks. Only `DeferredQueue` has a thread besides the engine's, and only between `end_step`
and the next call.

Callers: the block pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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

    def end_step(self) -> None:
        """Note that the engine's step is planned. Work in the background may go on until the next call."""
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

    def end_step(self) -> None: ...

    def check_integrity(self) -> None:
        blocks = list(self)
        assert len(blocks) == len(set(blocks)) == self._length
        assert all(block.after is not None and block.after.before is block for block in blocks)


class LazyQueue:
    """Invariant: every marked block has exactly one entry, which is stale. Every free block has exactly one
    entry that is not stale.
    """

    __slots__ = ("_entries", "_marked")

    def __init__(self) -> None:
        self._entries: deque[Block] = deque()
        self._marked: set[Block] = set()

    def __len__(self) -> int:
        return len(self._entries) - len(self._marked)

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self._entries if block not in self._marked)

    def append(self, block: Block) -> None:
        if block in self._marked:
            self._entries.remove(block)
            self._marked.remove(block)
        self._entries.append(block)

    def remove(self, block: Block) -> None:
        assert block not in self._marked, "the block is not in the queue"
        self._marked.add(block)

    def pop_first(self) -> Block:
        assert len(self), "no free block is left"
        while (block := self._entries.popleft()) in self._marked:
            self._marked.remove(block)
        return block

    def end_step(self) -> None:
        """Do nothing. Marked blocks stay until they come to the front."""

    def check_integrity(self) -> None:
        assert len(self._entries) == len(set(self._entries))
        assert self._marked <= set(self._entries)


class DeferredQueue(LazyQueue):
    """A thread removes the marked blocks between steps, and the next caller waits for it. Within a step it
    behaves like `LazyQueue`.
    """

    __slots__ = ("_sweep", "_sweeper")

    def __init__(self) -> None:
        super().__init__()
        self._sweeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="free-queue")
        self._sweep: Future[None] | None = None

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def __iter__(self) -> Iterator[Block]:
        self._settle()
        return super().__iter__()

    def append(self, block: Block) -> None:
        self._settle()
        super().append(block)

    def remove(self, block: Block) -> None:
        self._settle()
        super().remove(block)

    def pop_first(self) -> Block:
        self._settle()
        return super().pop_first()

    def end_step(self) -> None:
        self._settle()
        if self._marked:
            self._sweep = self._sweeper.submit(self._sweep_marked)

    def check_integrity(self) -> None:
        self._settle()
        super().check_integrity()

    def _settle(self) -> None:
        if self._sweep is not None:
            self._sweep.result()
            self._sweep = None

    def _sweep_marked(self) -> None:
        self._entries = deque(block for block in self._entries if block not in self._marked)
        self._marked.clear()
