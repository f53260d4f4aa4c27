"""The pool of KV cache blocks: who holds them, which are free, and which can be found again by their hash.

Invariants (`check_integrity`):
- a block is in the free queue exactly when nobody holds it (`ref_count == 0`);
- a block with a hash is in the cached map under that hash, and nothing else is. One hash may name several blocks:
  block tables are append-only, so equal content computed twice stays twice, and the one cached first is served;
- a free block keeps its hash, and with it its content, until it is taken for something else: that is the eviction.

The queue's order is the order of eviction. Blocks are freed tail first, so that of one sequence the block with the
longest prefix, which the fewest others can share, goes first; blocks without a hash hold nothing that anyone could
find, so they go before all others.

Callers: the KV cache manager, which decides; nothing here knows requests or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NewType

from model_server.core.hashing import BlockHash

BlockId = NewType("BlockId", int)


class Block:
    """One block of the pool; it lives as long as the engine and changes only through its pool."""

    __slots__ = ("after", "before", "block_hash", "block_id", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.before: Block | None = None
        self.after: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, hashed={self.block_hash is not None})"


class FreeQueue:
    """Free blocks in order of eviction: a doubly linked list, so that a hit leaves from the middle at once.

    The links are fields of the blocks themselves: nothing is allocated when a block joins or leaves.
    """

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
        """Join last in order of eviction."""
        last = self._ends.before
        assert last is not None
        self._link(last, block, self._ends)

    def prepend(self, block: Block) -> None:
        """Join first in order of eviction."""
        first = self._ends.after
        assert first is not None
        self._link(self._ends, block, first)

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

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.before is None, "the block is in the queue already"
        block.before, block.after = before, after
        before.after = after.before = block
        self._length += 1


class BlockPool:
    """A fixed number of blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.blocks = tuple(Block(BlockId(index)) for index in range(num_blocks))
        self._free = FreeQueue()
        for block in self.blocks:
            self._free.append(block)
        self._cached: dict[BlockHash, dict[BlockId, Block]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0 to 1."""
        return 1 - len(self._free) / len(self.blocks)

    def find(self, block_hash: BlockHash) -> Block | None:
        """The block that was cached first under this hash. Changes nothing."""
        copies = self._cached.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def find_all(self, block_hash: BlockHash) -> tuple[BlockId, ...]:
        """Every copy under this hash, in the order in which they were cached."""
        return tuple(self._cached.get(block_hash, ()))

    def hold(self, blocks: Sequence[Block]) -> None:
        """One more holder for each of these cached blocks; free ones leave the queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def take(self, count: int) -> list[Block]:
        """`count` blocks for new content, the first in order of eviction; what they held is forgotten."""
        assert 0 <= count <= self.num_free, "more blocks taken than are free"
        taken = [self._free.pop_first() for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.ref_count = 1
        return taken

    def cache(self, block: Block, block_hash: BlockHash) -> None:
        """A held block has become full and can be found under `block_hash` from now on."""
        assert block.ref_count > 0, "only a held block gets content"
        assert block.block_hash is None, "a block is cached once for each content"
        block.block_hash = block_hash
        self._cached.setdefault(block_hash, {})[block.block_id] = block

    def release(self, table: Sequence[Block]) -> None:
        """One holder less for each block of a sequence, given in the sequence's order."""
        unnamed: list[Block] = []
        for block in reversed(table):
            assert block.ref_count > 0, "a block was freed more often than it was held"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:
                unnamed.append(block)
            else:
                self._free.append(block)
        for block in reversed(unnamed):
            self._free.prepend(block)

    def forget_all(self) -> None:
        """Nothing cached can be found any more; held blocks stay with their holders."""
        for block in self.blocks:
            block.block_hash = None
        self._cached.clear()

    def free_in_order(self) -> list[BlockId]:
        """The order of eviction, for tests and for a page that shows the cache."""
        return [block.block_id for block in self._free]

    def check_integrity(self) -> None:
        """Raise AssertionError where the invariants at the top of this module do not hold."""
        free = self.free_in_order()
        assert len(free) == len(set(free)) == len(self._free)
        assert set(free) == {b.block_id for b in self.blocks if b.ref_count == 0}
        assert all(block.ref_count >= 0 for block in self.blocks)
        assert all(self._cached.values()), "a hash without blocks stayed in the map"
        mapped = {(name, i) for name, copies in self._cached.items() for i in copies}
        assert mapped == {(b.block_hash, b.block_id) for b in self.blocks if b.block_hash is not None}

    def _forget(self, block: Block) -> None:
        name = block.block_hash
        if name is None:
            return
        copies = self._cached[name]
        del copies[block.block_id]
        if not copies:
            del self._cached[name]
        block.block_hash = None
