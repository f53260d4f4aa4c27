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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model_server.core.beginnings import Beginnings
from model_server.core.blocks import Block
from model_server.core.cache_options import CacheOptions
from model_server.core.kv_cache import CachedPrefix, KVCacheManager
from model_server.core.request import Request, TokenId

_Place = bytes
"""The hash of the block before a block. For the first block of a prompt it is the prompt's packed scope."""


@dataclass(frozen=True, slots=True)
class _Content:
    place: _Place
    tokens: tuple[TokenId, ...]
    full_key: bool = False
    """True if the block is cached as a full block. A step may still be computing the rest of the block."""


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
