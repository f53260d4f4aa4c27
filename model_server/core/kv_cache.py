"""The KV cache manager knows which blocks each request holds, and finds the cached prefix of a new prompt.

Invariants (`check_integrity`):
- a request's table covers, in order, its computed tokens and the tokens that a step is computing. The table
  is append-only, with one exception: before a request writes into a block that others hold too, the block is
  copied, and the copy takes its place in the table;
- a block's reference count is the number of tables and pins that hold it;
- full blocks are cached (findable) when their slots are handed out. A step computes all its chunks before
  anything reads them, so a second request of the same step may already share these blocks;
- the manager never hands out more blocks than are free. A cached block that waits for eviction can be a hit,
  and is free too. A request that takes such a block as a hit cannot also get it as a new block, so hits and
  new blocks are counted together before anything changes.

`take_copies` hands over the copies that a step needs. The runner makes these copies in order, before it
computes.

Callers: the schedulers and the prompt cache. This module knows no time and no queues, and not what tokens
mean.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model_server.core.block_pool import BlockPool
from model_server.core.blocks import Block
from model_server.core.cache_options import CacheOptions
from model_server.core.eviction import make_order
from model_server.core.hashing import BlockHash, BlockHasher
from model_server.core.request import LoadedPrefix, OutsidePrefix, Request, RequestId


class CacheObserver(Protocol):
    """Follows the content of the cache. The manager calls the observer while it plans a step, so an observer
    only takes notes. Only full blocks are reported. A block that two requests computed is stored twice, and
    reported as stored and as removed twice.
    """

    def stored(self, request: Request, *, first: int, end: int) -> None:
        """Note that the blocks [first, end) of the request can now be found under its `block_hashes`."""

    def removed(self, block_hash: BlockHash) -> None:
        """Note that one of the blocks under this hash can no longer be found."""

    def cleared(self) -> None:
        """Note that no block can be found any more. `removed` may have been called for some of them just
        before.
        """


class Unobserved:
    """Ignores all events."""

    def stored(self, request: Request, *, first: int, end: int) -> None: ...

    def removed(self, block_hash: BlockHash) -> None: ...

    def cleared(self) -> None: ...


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters in tokens over first admissions. The return of a preempted request is not a second query."""

    queries_tokens: int = 0
    hits_tokens: int = 0
    external_queries_tokens: int = 0
    """Tokens that were not found in this cache, and were looked up in a store below it."""
    external_hits_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The part of a prompt that is in the cache: full `blocks` to share, and a block whose first tokens are
    copied (`tail`).
    """

    blocks: Sequence[Block]
    num_tokens: int
    """Tokens that need not be computed, including the tokens whose content is outside the cache."""
    tail: Block | None = None
    loaded: LoadedPrefix | None = None
    """The content to copy into new blocks after `blocks`."""
    outside_blocks: int = 0
    """Number of blocks before `blocks` whose content is read from outside the cache. They stay empty."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` slots of `source` to `target`."""

    source: Block
    target: Block
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """Copy content of a store to `blocks`, which are the blocks of its prefix from `first_block` on."""

    prefix: LoadedPrefix
    first_block: int
    blocks: Sequence[Block]


class KVCacheManager:
    """Manages full blocks only."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size_tokens: int,
        enable_prefix_caching: bool,
        options: CacheOptions | None = None,
    ) -> None:
        self.options = options = options or CacheOptions()
        self.pool = BlockPool(
            num_blocks,
            order=make_order(options.eviction),
            max_unused_blocks=options.max_unused_blocks,
            on_forget=self._forgotten,
        )
        self.block_size_tokens = block_size_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._unreported: Counter[BlockHash] = Counter()
        """Cached blocks with approximate content, which are not reported to the observer."""
        self.observer: CacheObserver = Unobserved()
        """The observer hears of full blocks only, so it does not fit a cache that also finds partial
        blocks.
        """
        self._hasher = BlockHasher(
            options.hash_algorithm, block_size_tokens=block_size_tokens, seed=options.hash_seed
        )
        self._tables: dict[RequestId, list[Block]] = {}
        self._num_cached_blocks: dict[RequestId, int] = {}
        self._pins: Counter[Block] = Counter()
        self._copies: list[BlockCopy] = []
        self._loads: list[PrefixLoad] = []

    @property
    def capacity_tokens(self) -> int:
        return len(self.pool.blocks) * self.block_size_tokens

    @property
    def num_pins(self) -> int:
        return self._pins.total()

    @property
    def usage(self) -> float:
        """Return the share of the blocks that requests hold, 0 to 1. Blocks that are only pinned do not
        count, because they give way to requests.
        """
        if not self._pins:
            return self.pool.usage
        return len({block for table in self._tables.values() for block in table}) / len(self.pool.blocks)

    def table(self, request_id: RequestId) -> Sequence[Block]:
        """Return the request's blocks in order. The list grows with the request, so a step may keep it."""
        return self._tables[request_id]

    def get_computed(self, request: Request) -> CachedPrefix:
        """Return the part of the request's prefix that is in the cache, up to the first missing block.

        At least one token is left to compute, because the first new token needs its output. So a full hit
        ends one block early. This changes no block.
        """
        if not self.enable_prefix_caching:
            return CachedPrefix((), 0)
        usable = (len(request.token_ids) - 1) // self.block_size_tokens
        self._hasher.extend(request.block_hashes, request.token_ids, num_blocks=usable, scope=request.scope)
        stored = request.stored
        outside = stored.num_blocks if isinstance(stored, OutsidePrefix) else 0
        found: list[Block] = []
        for block_hash in request.block_hashes[outside:usable]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        size, num_blocks = self.block_size_tokens, outside + len(found)
        if isinstance(stored, LoadedPrefix) and stored.first_block <= num_blocks < stored.end_block:
            assert stored.end_block <= usable, "the last token is computed"
            return CachedPrefix(found, stored.end_block * size, loaded=stored)
        return CachedPrefix(found, num_blocks * size, outside_blocks=outside)

    def allocate(self, request: Request, prefix: CachedPrefix, *, num_new_tokens: int) -> bool:
        """Admit a request with its cached `prefix` and slots for the next tokens. Return False if there is no
        room, and then nothing has changed.
        """
        assert request.request_id not in self._tables, "the request is admitted already"
        assert num_new_tokens > 0
        kept = self._shareable(prefix)
        num_tokens = prefix.num_tokens + num_new_tokens
        num_new_blocks = self.blocks_for(num_tokens) - len(kept)
        hits_in_queue = sum(block.ref_count == 0 for block in kept)
        if num_new_blocks + hits_in_queue > self.pool.num_free:
            return False
        self.pool.hold(kept)
        new, outside = self._take(num_new_blocks), prefix.outside_blocks
        table = self._tables[request.request_id] = [*new[:outside], *kept, *new[outside:]]
        self._num_cached_blocks[request.request_id] = outside + len(prefix.blocks)
        if prefix.loaded is not None:
            first = len(prefix.blocks)
            self._loads.append(PrefixLoad(prefix.loaded, first, table[first : prefix.loaded.end_block]))
        if prefix.tail is not None and len(kept) == len(prefix.blocks):
            used = prefix.num_tokens % self.block_size_tokens
            self._copies.append(BlockCopy(prefix.tail, table[len(kept)], used))
        self._cache_full_blocks(request, num_tokens=num_tokens)
        return True

    def append(self, request: Request, *, num_new_tokens: int) -> bool:
        """Add slots for the next tokens of an admitted request. Return False if there is no room, and then
        nothing has changed.
        """
        table = self._tables[request.request_id]
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_new_blocks = max(0, self.blocks_for(num_tokens) - len(table))
        written, used = divmod(request.num_computed_tokens, self.block_size_tokens)
        copy = used > 0 and table[written].ref_count > 1
        if num_new_blocks + copy > self.pool.num_free:
            return False
        if copy:
            self._copy_before_write(table, written, num_tokens=used)
        if num_new_blocks:
            table.extend(self._take(num_new_blocks))
        self._cache_full_blocks(request, num_tokens=num_tokens)
        return True

    def take_in(self, request: Request, *, end_block: int) -> int:
        """Take in full blocks of a prompt that came from another server. Cache the blocks up to `end_block`
        that have room, without a holder. Return the number of leading blocks that are cached now.
        """
        known = list(self.get_computed(request).blocks)
        end_block = min(end_block, len(request.block_hashes))
        self.pool.hold(known)
        new = self.pool.take(min(max(0, end_block - len(known)), self.pool.num_free))
        end = len(known) + len(new)
        for index, block in enumerate(new, start=len(known)):
            self._cache(request, block, index)
        if new:
            self.observer.stored(request, first=len(known), end=end)
        self.pool.release([*known, *new])
        return end

    def computed(self, request: Request) -> None:
        """Note that `request.num_computed_tokens` has grown. This class cached full blocks earlier and does
        nothing here. Subclasses override this method.
        """

    def free(self, request: Request) -> None:
        """Release the request's blocks. Blocks that it cached can be found until they are evicted."""
        self.pool.release(self._tables.pop(request.request_id))
        del self._num_cached_blocks[request.request_id]

    def adopt(self, request: Request, blocks: Sequence[Block], *, num_tokens: int) -> None:
        """Admit a request with blocks that another holder has, and that contain its first `num_tokens`
        tokens.
        """
        assert request.request_id not in self._tables, "the request is admitted already"
        assert num_tokens <= len(request.token_ids)
        assert len(blocks) == self.blocks_for(num_tokens)
        self.pool.hold(blocks)
        self._tables[request.request_id] = list(blocks)
        self._num_cached_blocks[request.request_id] = num_tokens // self.block_size_tokens
        request.num_computed_tokens = num_tokens

    def pin(self, blocks: Sequence[Block]) -> None:
        """Add a holder that is not a request."""
        self.pool.hold(blocks)
        self._pins.update(blocks)

    def unpin(self, blocks: Sequence[Block]) -> None:
        self._pins.subtract(blocks)
        self._pins = +self._pins
        self.pool.release(blocks)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies that were ordered since the last call, in their order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def take_loads(self) -> tuple[PrefixLoad, ...]:
        """Return the loads that were ordered since the last call. The runner makes them before it computes
        anything.
        """
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

    def end_step(self) -> None:
        self.pool.end_step()

    def record_admission(self, *, num_tokens: int, num_hit_tokens: int, num_stored_tokens: int = 0) -> None:
        """Count an admission: `num_hit_tokens` were found in this cache, and `num_stored_tokens` only in a
        store below it.
        """
        self.stats.queries_tokens += num_tokens
        self.stats.hits_tokens += num_hit_tokens
        self.stats.external_queries_tokens += num_tokens - num_hit_tokens
        self.stats.external_hits_tokens += num_stored_tokens

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Unfinished requests keep their blocks, and cache only blocks that they
        fill from now on.
        """
        self.pool.forget_all()
        self._unreported.clear()
        self.observer.cleared()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = Counter(block for table in self._tables.values() for block in table) + self._pins
        assert all(block.ref_count == held[block] for block in self.pool.blocks)
        assert all(count > 0 for count in self._pins.values())
        assert all(count > 0 for count in self._unreported.values())
        assert self._tables.keys() == self._num_cached_blocks.keys()
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), "a table holds a block twice"
            assert self._num_cached_blocks[request_id] <= len(table)
            self._check_uncached(table[self._num_cached_blocks[request_id] :])

    def _check_uncached(self, blocks: Sequence[Block]) -> None:
        assert all(block.block_hash is None for block in blocks)

    def _shareable(self, prefix: CachedPrefix) -> list[Block]:
        """Return the blocks of a prefix that the request can use as they are."""
        return list(prefix.blocks)

    def _take(self, num_blocks: int) -> list[Block]:
        spare = min(self.options.preallocated_blocks, self.pool.num_free - num_blocks) if num_blocks else 0
        return self.pool.take(num_blocks + spare)

    def _copy_before_write(self, table: list[Block], index: int, *, num_tokens: int) -> None:
        [target] = self.pool.take(1)
        shared = table[index]
        self._copies.append(BlockCopy(shared, target, num_tokens))
        table[index] = target
        self.pool.release([shared])

    def _cache_full_blocks(self, request: Request, *, num_tokens: int) -> None:
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size_tokens
        first = self._num_cached_blocks[request.request_id]
        if num_full <= first:
            return
        self._hasher.extend(request.block_hashes, request.token_ids, num_blocks=num_full, scope=request.scope)
        table = self._tables[request.request_id]
        for index in range(first, num_full):
            self._cache(request, table[index], index)
        self._num_cached_blocks[request.request_id] = num_full
        if request.scope.approximation:
            self._unreported.update(request.block_hashes[first:num_full])
        else:
            self.observer.stored(request, first=first, end=num_full)

    def _cache(self, request: Request, block: Block, index: int) -> None:
        """Note that the `index`th block of the request is full."""
        self.pool.cache(block, request.block_hashes[index], prefix_blocks=index + 1)

    def _forgotten(self, block: Block) -> None:
        """Note that the pool will remove a block's hash."""
        if block.block_hash is None:
            return
        if self._unreported[block.block_hash]:
            self._unreported -= Counter((block.block_hash,))
        else:
            self.observer.removed(block.block_hash)
