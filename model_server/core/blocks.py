"""One block of the KV cache, with the values by which free blocks are ordered.

A block lives as long as its pool, and only the pool changes it. Callers: the pool and the free orders.
"""

from typing import NewType

from model_server.core.hashing import BlockHash

BlockId = NewType("BlockId", int)


class Block:
    __slots__ = (
        "after",
        "before",
        "block_hash",
        "block_id",
        "last_use",
        "prefix_blocks",
        "ref_count",
        "uses",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.prefix_blocks = 0
        """Number of blocks in the prefix that this block ends. 0 means that the block has no hash."""
        self.last_use = 0
        """The pool's step in which a holder last released the block."""
        self.uses = 0
        """How often the content was held: once when it was computed, then once for each hit."""
        self.before: Block | None = None
        self.after: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, hashed={self.block_hash is not None})"
