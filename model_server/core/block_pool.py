"""The pool of KV cache blocks knows which blocks are held, which are free, and which can be found again by
their hash.

Invariants (`check_integrity`):
- a block is free exactly when nobody holds it (`ref_count == 0`). A free block without a hash has no content
  that could be found, and is on the stack of empty blocks. A free block with a hash is in the order of
  eviction;
- the map of cached blocks contains exactly the blocks with a hash. One hash may name several blocks. Block
  tables are append-only, so content that was computed twice stays in two blocks. The block that was cached
  first is used;
- a free block keeps its hash and content until it is taken for other content. Taking it is the eviction;
- at most `max_unused_blocks` free blocks keep a hash. If more of them have a hash, the first in the order of
  eviction lose it.

New content goes to empty blocks first, beginning with the block that was freed last. Then it goes to blocks
in the order of eviction. The blocks of a sequence are freed from its tail. So the block with the longest
prefix is evicted first, since the fewest other sequences can share it.

Callers: the KV cache managers and the prompt cache, which decide which blocks to take and to release. This
module knows neither requests nor tokens.
"""

from collections.abc import Callable, Sequence

from model_server.core.blocks import Block, BlockId
from model_server.core.eviction import make_order
from model_server.core.free_queue import FreeOrder
from model_server.core.hashing import BlockHash

__all__ = ["Block", "BlockId", "BlockPool"]


def _do_nothing(block: Block) -> None:
    """Do nothing. This is the default of `on_forget`."""


class BlockPool:
    """A fixed number of blocks, numbered from 0."""

    def __init__(
        self,
        num_blocks: int,
        *,
        order: FreeOrder | None = None,
        max_unused_blocks: int | None = None,
        on_forget: Callable[[Block], None] = _do_nothing,
    ) -> None:
        """`order` is the order of eviction, by default `lru`. `on_forget` is called just before a block loses
        its hash.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        if max_unused_blocks is not None and max_unused_blocks < 0:
            raise ValueError("max_unused_blocks must not be negative")
        self.blocks = tuple(Block(BlockId(index)) for index in range(num_blocks))
        self._unused = order if order is not None else make_order("lru")
        self._empty = list(reversed(self.blocks))
        self._max_unused_blocks = num_blocks if max_unused_blocks is None else max_unused_blocks
        self._on_forget = on_forget
        self._cached: dict[BlockHash, dict[BlockId, Block]] = {}
        self._step = 0

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._unused)

    @property
    def num_unused(self) -> int:
        """Return the number of free blocks that can be found by their hash."""
        return len(self._unused)

    @property
    def usage(self) -> float:
        """Return the share of the blocks that are held, 0 to 1."""
        return 1 - self.num_free / len(self.blocks)

    def find(self, block_hash: BlockHash) -> Block | None:
        """Return the block that was cached first under this hash, without adding a holder."""
        copies = self._cached.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def find_all(self, block_hash: BlockHash) -> tuple[BlockId, ...]:
        """Return every copy under this hash, in the order in which they were cached."""
        return tuple(self._cached.get(block_hash, ()))

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a holder to each of these blocks, which are already held or cached."""
        for block in blocks:
            if block.ref_count == 0:
                assert block.block_hash is not None, "an empty block is taken, not held"
                self._unused.remove(block)
            block.ref_count += 1
            block.uses += 1

    def take(self, count: int) -> list[Block]:
        """Return `count` blocks for new content. Their old content is forgotten."""
        assert 0 <= count <= self.num_free, "more blocks taken than are free"
        taken: list[Block] = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block = self._unused.pop_first()
                self.uncache(block)
            block.ref_count = block.uses = 1
            taken.append(block)
        return taken

    def cache(self, block: Block, block_hash: BlockHash, *, prefix_blocks: int = 0) -> None:
        """Let a held block be found under `block_hash` from now on. The block ends a prefix of
        `prefix_blocks` blocks. Some policies use this number; `lru` does not.
        """
        assert block.ref_count > 0, "only a held block gets content"
        assert block.block_hash is None, "a block has one hash at a time"
        block.block_hash = block_hash
        block.prefix_blocks = prefix_blocks
        self._cached.setdefault(block_hash, {})[block.block_id] = block

    def uncache(self, block: Block) -> None:
        """Remove the block from the cache: its content can no longer be found. Its holders keep the block.
        The block must be held, or `take` must be about to hand it out.
        """
        name = block.block_hash
        if name is None:
            return
        self._on_forget(block)
        copies = self._cached[name]
        del copies[block.block_id]
        if not copies:
            del self._cached[name]
        block.block_hash = None
        block.prefix_blocks = 0

    def release(self, table: Sequence[Block]) -> None:
        """Remove a holder from each of these blocks, which are given in the order of their sequence."""
        empty: list[Block] = []
        for block in reversed(table):
            assert block.ref_count > 0, "a block was freed more often than it was held"
            block.ref_count -= 1
            block.last_use = self._step
            if block.ref_count:
                continue
            if block.block_hash is None:
                empty.append(block)
            else:
                self._unused.append(block)
        self._empty.extend(reversed(empty))
        while len(self._unused) > self._max_unused_blocks:
            block = self._unused.pop_first()
            self.uncache(block)
            self._empty.append(block)

    def forget_all(self) -> None:
        """Remove all blocks from the cache: their content can no longer be found. Held blocks stay with their
        holders, and the order of blocks stays.
        """
        unused = [self._unused.pop_first() for _ in range(len(self._unused))]
        self._empty[:0] = reversed(unused)
        for block in self.blocks:
            if block.block_hash is not None:
                self._on_forget(block)
                block.block_hash = None
                block.prefix_blocks = 0
        self._cached.clear()

    def end_step(self) -> None:
        """Advance the time of the eviction order. This is called when a step of the engine is planned."""
        self._step += 1

    def free_in_order(self) -> list[BlockId]:
        """Return the free blocks in the order in which they will be taken, for tests and for a page that
        shows the cache.
        """
        return [block.block_id for block in (*reversed(self._empty), *self._unused)]

    def check_integrity(self) -> None:
        self._unused.check_integrity()
        free = self.free_in_order()
        assert len(free) == len(set(free)) == self.num_free
        assert set(free) == {b.block_id for b in self.blocks if b.ref_count == 0}
        assert all(block.block_hash is None for block in self._empty)
        assert all(block.block_hash is not None for block in self._unused)
        assert len(self._unused) <= self._max_unused_blocks
        assert all(block.ref_count >= 0 for block in self.blocks)
        assert all(self._cached.values()), "a hash without blocks stayed in the map"
        mapped = {(name, i) for name, copies in self._cached.items() for i in copies}
        assert mapped == {(b.block_hash, b.block_id) for b in self.blocks if b.block_hash is not None}
