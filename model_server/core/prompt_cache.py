"""Keeps whole prompts with their blocks and the logits after their last token, so that an equal prompt needs
no prefill.

The block cache finds shared beginnings. This cache finds only equal prompts, and nothing has to be computed
for them, since the first token is sampled from the kept logits. The blocks stay pinned while the prompt is
kept, including its partial tail. A request that continues from them copies the tail before it writes into it.

Invariants (`check_integrity`): at most `max_entries` prompts are kept. 0 means that no prompt is kept. Each
prompt pins exactly its blocks, and releases them when it is removed. The least recently used prompt is
removed first.

Callers: the engine and its scheduler. The model defines what logits are.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from model_server.core.blocks import Block
from model_server.core.hashing import PrefixScope
from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Request, TokenId

_Key = tuple[PrefixScope, tuple[TokenId, ...]]


@dataclass(frozen=True, slots=True)
class PromptEntry:
    blocks: tuple[Block, ...]
    last_logits: object


class PromptCache:
    def __init__(self, kv_cache: KVCacheManager, *, max_entries: int) -> None:
        if max_entries < 0:
            raise ValueError("max_entries must not be negative")
        self._kv_cache = kv_cache
        self._max_entries = max_entries
        self._entries: OrderedDict[_Key, PromptEntry] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, request: Request, last_logits: object) -> None:
        """Keep the prompt of an admitted request that was just computed."""
        assert request.num_computed_tokens == request.num_prompt_tokens == len(request.token_ids)
        if not self._max_entries:
            return
        key = _key(request)
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        while len(self._entries) >= self._max_entries:
            self.evict_one()
        num_blocks = self._kv_cache.blocks_for(request.num_prompt_tokens)
        entry = PromptEntry(tuple(self._kv_cache.table(request.request_id)[:num_blocks]), last_logits)
        self._kv_cache.pin(entry.blocks)
        self._entries[key] = entry

    def attach(self, request: Request) -> PromptEntry | None:
        """Admit the request with its whole prompt computed. Return None if the prompt is not kept, and then
        nothing was done.
        """
        key = _key(request)
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        self._kv_cache.adopt(request, entry.blocks, num_tokens=request.num_prompt_tokens)
        return entry

    def evict_one(self) -> bool:
        """Remove the least recently used prompt. Return False if no prompt is kept."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        self._kv_cache.unpin(entry.blocks)
        return True

    def clear(self) -> None:
        while self.evict_one():
            pass

    def check_integrity(self) -> None:
        assert len(self._entries) <= self._max_entries
        for (_, tokens), entry in self._entries.items():
            assert len(entry.blocks) == self._kv_cache.blocks_for(len(tokens))
        pinned = Counter(block for entry in self._entries.values() for block in entry.blocks)
        assert pinned.total() == self._kv_cache.num_pins


def _key(request: Request) -> _Key:
    return request.scope, tuple(request.token_ids[: request.num_prompt_tokens])
