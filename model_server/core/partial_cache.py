"""The KV cache manager whose blocks can be found before they are full, token by token.

As in the report on hash table prefix caching, a partial block is in the table under the hash of its prefix
and its tokens so far. The block's key is replaced as the block grows. When the block is full, the next block
gets a key of its own. A key alone finds a block only for a prompt that ends exactly where the block ends.
This fails once the block has grown by one token of an answer. So each cached block is also listed under the
prefix before it, with the tokens that it has computed, in their order (`beginnings`). A prompt gets the
longest beginning that any of these blocks has in common with it.

If the cached block is free and ends where the match ends, the request continues in it. Otherwise the request
gets a copy of the matching slots, since it will write into the block.

Invariants (`check_integrity`): a listed block is cached and lists only computed tokens (tokens that a step is
still computing cannot be copied before this step computes). Besides the full blocks of an unfinished request,
at most its last block has a hash. Full blocks are shared as in the base class. Callers: as for the base
class.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from model_server.core.blocks import Block
from model_server.core.cache_options import CacheOptions
from model_server.core.kv_cache import CachedPrefix, KVCacheManager
from model_server.core.request import Request, TokenId

_Tokens = tuple[TokenId, ...]
_Place = bytes
"""The hash of the block before a block. For the first block of a prompt it is the prompt's packed scope."""


@dataclass(frozen=True, slots=True)
class _Content:
    place: _Place
    tokens: tuple[TokenId, ...]
    full_key: bool = False
    """True if the block is cached as a full block. A step may still be computing the rest of the block."""


class Beginnings:
    """The cached blocks that follow one prefix, ordered by their tokens. A prompt continues in the block that
    shares the longest beginning with it. This block is next to the place where the prompt would be in the
    order, so a binary search finds the block among any number of blocks. Blocks with equal tokens are side by
    side, ordered by their ids.
    """

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


class PartialKVCacheManager(KVCacheManager):
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size_tokens: int,
        enable_prefix_caching: bool,
        options: CacheOptions | None = None,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size_tokens=block_size_tokens,
            enable_prefix_caching=enable_prefix_caching,
            options=options,
        )
        self._content: dict[Block, _Content] = {}
        self._listed: dict[_Place, Beginnings] = {}

    def get_computed(self, request: Request) -> CachedPrefix:
        """Do what the base class does. Then add as many tokens of the next block as some cached block has
        in common.
        """
        full = super().get_computed(request)
        if not self.enable_prefix_caching:
            return full
        end = min(full.num_tokens + self.block_size_tokens, len(request.token_ids) - 1)
        wanted = tuple(request.token_ids[full.num_tokens : end])
        if not wanted:
            return full
        listed = self._listed.get(_place(request, len(full.blocks)))
        if listed is None:
            return full
        common, tail = listed.longest(wanted)
        return CachedPrefix(full.blocks, full.num_tokens + common, tail)

    def computed(self, request: Request) -> None:
        """List the tokens that the last step computed, and give the last block the key of its tokens so
        far.
        """
        if not self.enable_prefix_caching:
            return
        size, table = self.block_size_tokens, self._tables[request.request_id]
        last = (request.num_computed_tokens - 1) // size
        # A step adds tokens to the block where it began and to later blocks, so the walk ends at the first
        # up-to-date block.
        for index in range(last, -1, -1):
            tokens = tuple(
                request.token_ids[index * size : min((index + 1) * size, request.num_computed_tokens)]
            )
            block = table[index]
            known = self._content.get(block)
            if known is not None and len(known.tokens) >= len(tokens):
                break
            if len(tokens) < size:
                self._rekey_tail(request, block, index)
            if block.block_hash is not None:
                self._list(block, _Content(_place(request, index), tokens, full_key=len(tokens) == size))

    def check_integrity(self) -> None:
        super().check_integrity()
        assert all(block.block_hash is not None for block in self._content)
        listed = {block: (place, tokens) for place, at in self._listed.items() for block, tokens in at}
        assert listed == {block: (content.place, content.tokens) for block, content in self._content.items()}
        assert all(map(len, self._listed.values())), "a place without blocks stayed"
        for at in self._listed.values():
            at.check_integrity()

    def _check_uncached(self, blocks: Sequence[Block]) -> None:
        super()._check_uncached(blocks[1:])

    def _shareable(self, prefix: CachedPrefix) -> list[Block]:
        tail = prefix.tail
        if tail is None:
            return list(prefix.blocks)
        used = prefix.num_tokens - len(prefix.blocks) * self.block_size_tokens
        content = self._content[tail]
        in_place = tail.ref_count == 0 and len(content.tokens) == used and not content.full_key
        return [*prefix.blocks, tail] if in_place else list(prefix.blocks)

    def _rekey_tail(self, request: Request, block: Block, index: int) -> None:
        if block.ref_count > 1:
            # other requests may continue from this block: it is cached, or it will be copied before it grows
            return
        self._hasher.extend(request.block_hashes, request.token_ids, num_blocks=index, scope=request.scope)
        end = request.num_computed_tokens
        name = self._hasher.name(
            request.block_hashes[:index], request.token_ids, end=end, scope=request.scope
        )
        self.pool.uncache(block)
        self.pool.cache(block, name, prefix_blocks=index + 1)

    def _cache(self, request: Request, block: Block, index: int) -> None:
        """Note that the block is full. Its key as a partial block is removed, and its computed tokens stay
        listed.
        """
        content = self._content.get(block)
        self.pool.uncache(block)
        super()._cache(request, block, index)
        if content is not None:
            self._list(block, replace(content, full_key=True))

    def _forgotten(self, block: Block) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            at = self._listed[content.place]
            at.remove(content.tokens, block)
            if not at:
                del self._listed[content.place]

    def _list(self, block: Block, content: _Content) -> None:
        self._forgotten(block)
        self._content[block] = content
        self._listed.setdefault(content.place, Beginnings()).add(content.tokens, block)


def _place(request: Request, index: int) -> _Place:
    return request.block_hashes[index - 1] if index else request.scope.packed()


def _common(left: Sequence[TokenId], right: Sequence[TokenId]) -> int:
    """Return the number of leading tokens that `left` and `right` have in common."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def make_manager(
    *, num_blocks: int, block_size_tokens: int, enable_prefix_caching: bool, options: CacheOptions
) -> KVCacheManager:
    """Return the manager that `options.partial_blocks` asks for."""
    kind = PartialKVCacheManager if options.partial_blocks else KVCacheManager
    return kind(
        num_blocks=num_blocks,
        block_size_tokens=block_size_tokens,
        enable_prefix_caching=enable_prefix_caching,
        options=options,
    )
