"""The KV cache manager is compared with a slow, simple model that has lists and whole prefixes in place of
links and hashes.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Request, RequestId, TokenId

BLOCK = 2
NUM_BLOCKS = 7

Prefix = tuple[str, tuple[int, ...]]


class PlainCache:
    """The same rule, written with lists. The content of a block is its salt and the whole prefix that ends
    with the block.
    """

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self.content: dict[int, Prefix] = {}
        self.cached_at: dict[int, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.offered: dict[str, int] = {}
        self.clock = 0

    def refs(self, block: int) -> int:
        return sum(block in table for table in self.tables.values())

    def hits(self, salt: str, tokens: list[int]) -> list[int]:
        found = []
        for end in range(BLOCK, len(tokens), BLOCK):
            copies = [b for b, what in self.content.items() if what == (salt, tuple(tokens[:end]))]
            if not copies:
                break
            found.append(min(copies, key=lambda b: self.cached_at[b]))
        return found

    def extend(self, name: str, salt: str, tokens: list[int], upto: int, hits: list[int] | None) -> bool:
        have = hits if hits is not None else self.tables[name]
        new = max(0, -(-upto // BLOCK) - len(have))
        rest = [b for b in self.free if b not in have]
        if new > len(rest):
            return False
        taken = rest[:new]
        self.free = rest[new:]
        for block in taken:
            self.content.pop(block, None)
        table = self.tables[name] = [*have, *taken]
        first = len(hits) if hits is not None else self.offered[name]
        for index in range(first, upto // BLOCK):
            self.clock += 1
            self.content[table[index]] = (salt, tuple(tokens[: (index + 1) * BLOCK]))
            self.cached_at[table[index]] = self.clock
        self.offered[name] = max(first, upto // BLOCK)
        return True

    def release(self, name: str) -> None:
        table = self.tables.pop(name)
        freed = [b for b in table if self.refs(b) == 0]
        named = [b for b in reversed(freed) if b in self.content]
        unnamed = [b for b in reversed(freed) if b not in self.content]
        self.free = unnamed + self.free + named


class KVCacheMachine(RuleBasedStateMachine):
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(
            num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK, enable_prefix_caching=True
        )
        self.plain = PlainCache()
        self.count = 0

    @rule(
        target=live,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "s"]),
        chunk=st.integers(1, 9),
    )
    def admit(self, tokens: list[int], salt: str, chunk: int) -> Request | None:
        self.count += 1
        request = Request(
            request_id=RequestId(str(self.count)),
            token_ids=[TokenId(t) for t in tokens],
            max_tokens=50,
            arrival_s=0.0,
            cache_salt=salt,
        )
        computed = self.manager.get_computed(request)
        expected = self.plain.hits(salt, tokens)
        assert [block.block_id for block in computed.blocks] == expected
        start = computed.num_tokens
        num_new = min(chunk, len(tokens) - start)
        done = self.manager.allocate(request, computed, num_new_tokens=num_new)
        assert done == self.plain.extend(request.request_id, salt, tokens, start + num_new, expected)
        if not done:
            return None
        request.num_computed_tokens = start + num_new
        return request

    @rule(request=live, token=st.integers(0, 1))
    def compute_next(self, request: Request | None, token: int) -> None:
        if request is None or request.request_id not in self.plain.tables:
            return
        if request.num_uncomputed_tokens == 0:
            request.token_ids.append(TokenId(token))
        upto = request.num_computed_tokens + 1
        done = self.manager.append(request, num_new_tokens=1)
        tokens = [int(t) for t in request.token_ids]
        assert done == self.plain.extend(request.request_id, request.cache_salt, tokens, upto, None)
        if done:
            request.num_computed_tokens = upto

    @rule(request=consumes(live))
    def free(self, request: Request | None) -> None:
        if request is not None:
            self.manager.free(request)
            self.plain.release(request.request_id)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.plain.content.clear()

    @invariant()
    def same_state(self) -> None:
        self.manager.check_integrity()
        assert self.manager.pool.free_in_order() == self.plain.free
        for name, table in self.plain.tables.items():
            assert [b.block_id for b in self.manager.table(RequestId(name))] == table


KVCacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestKVCache = pytest.mark.slow(KVCacheMachine.TestCase)
