"""The KV cache manager: which blocks each request holds, and what of a new prompt is there already.

Invariants (`check_integrity`):
- a request's table covers its computed tokens and those being computed, in order, and is append-only;
- a block's reference count is the number of tables that hold it;
- blocks are cached (findable) as soon as they are full, when their slots are handed out: a step computes all its
  chunks before anything reads them, so a second request of the same step may already share them;
- never more is handed out than is free. Cached blocks that wait in the free queue are hits and free at once, and
  a request that takes them as hits cannot also get them as new blocks: both are counted before anything moves.

Callers: the scheduler. Time, queues and tokens' meaning are not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from model_server.core.block_pool import Block, BlockPool
from model_server.core.hashing import BlockHasher
from model_server.core.request import Request, RequestId


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters in tokens over first admissions; a preempted request's return is not a second query."""

    queries_tokens: int = 0
    hits_tokens: int = 0


class KVCacheManager:
    def __init__(self, *, num_blocks: int, block_size_tokens: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size_tokens = block_size_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._hasher = BlockHasher(block_size_tokens)
        self._tables: dict[RequestId, list[Block]] = {}
        self._num_cached_blocks: dict[RequestId, int] = {}

    @property
    def capacity_tokens(self) -> int:
        return len(self.pool.blocks) * self.block_size_tokens

    def table(self, request_id: RequestId) -> Sequence[Block]:
        """The request's blocks in order; the same list grows with it, so a step may keep it."""
        return self._tables[request_id]

    def get_computed(self, request: Request) -> list[Block]:
        """Blocks of the request's prefix that are in the cache, from the start on without a gap.

        At least one token is left to compute, because the first new token needs its output: a full hit ends one
        block early. Changes no block.
        """
        if not self.enable_prefix_caching:
            return []
        usable = (len(request.token_ids) - 1) // self.block_size_tokens
        self._hasher.extend(
            request.block_hashes, request.token_ids, num_blocks=usable, extra=request.hash_extra
        )
        found: list[Block] = []
        for block_hash in request.block_hashes[:usable]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, request: Request, computed: Sequence[Block], *, num_new_tokens: int) -> bool:
        """Admit a request: hold its `computed` blocks and give it slots for the next tokens. False: no room, no change."""
        assert request.request_id not in self._tables, "the request is admitted already"
        assert num_new_tokens > 0
        covered = len(computed) * self.block_size_tokens
        num_new_blocks = self._blocks_for(covered + num_new_tokens) - len(computed)
        hits_in_queue = sum(block.ref_count == 0 for block in computed)
        if num_new_blocks + hits_in_queue > self.pool.num_free:
            return False
        self.pool.hold(computed)
        self._tables[request.request_id] = [*computed, *self.pool.take(num_new_blocks)]
        self._num_cached_blocks[request.request_id] = len(computed)
        self._cache_full_blocks(request, num_tokens=covered + num_new_tokens)
        return True

    def append(self, request: Request, *, num_new_tokens: int) -> bool:
        """Slots for the next tokens of an admitted request. False: no room, no change."""
        table = self._tables[request.request_id]
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_new_blocks = self._blocks_for(num_tokens) - len(table)
        if num_new_blocks > self.pool.num_free:
            return False
        if num_new_blocks > 0:
            table.extend(self.pool.take(num_new_blocks))
        self._cache_full_blocks(request, num_tokens=num_tokens)
        return True

    def free(self, request: Request) -> None:
        """The request holds nothing any more; what it cached stays findable until it is evicted."""
        self.pool.release(self._tables.pop(request.request_id))
        del self._num_cached_blocks[request.request_id]

    def record_admission(self, *, num_tokens: int, num_hit_tokens: int) -> None:
        self.stats.queries_tokens += num_tokens
        self.stats.hits_tokens += num_hit_tokens

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; requests under way keep their blocks and cache only what they fill from now on."""
        self.pool.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError where the invariants at the top of this module do not hold."""
        self.pool.check_integrity()
        held = Counter(block.block_id for table in self._tables.values() for block in table)
        assert all(block.ref_count == held[block.block_id] for block in self.pool.blocks)
        assert self._tables.keys() == self._num_cached_blocks.keys()
        for request_id, table in self._tables.items():
            assert len({block.block_id for block in table}) == len(table), "a table holds a block twice"
            assert self._num_cached_blocks[request_id] <= len(table)
            assert all(b.block_hash is None for b in table[self._num_cached_blocks[request_id] :])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)

    def _cache_full_blocks(self, request: Request, *, num_tokens: int) -> None:
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size_tokens
        first = self._num_cached_blocks[request.request_id]
        if num_full <= first:
            return
        self._hasher.extend(
            request.block_hashes, request.token_ids, num_blocks=num_full, extra=request.hash_extra
        )
        table = self._tables[request.request_id]
        for index in range(first, num_full):
            self.pool.cache(table[index], request.block_hashes[index])
        self._num_cached_blocks[request.request_id] = num_full
