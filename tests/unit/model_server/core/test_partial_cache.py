"""Partial blocks in the cache, which grow, match token by token, and are continued or copied."""

import functools
import random

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.hashing import BlockHasher
from model_server.core.kv_cache import KVCacheManager
from model_server.core.partial_cache import PartialKVCacheManager
from model_server.core.request import Adapter, Request, TokenId
from tests.harness.engine_requests import request_of as any_request

request_of = functools.partial(any_request, max_tokens=1000)


def partial_manager(num_blocks: int = 100, *, block_size: int = 16) -> PartialKVCacheManager:
    return PartialKVCacheManager(
        num_blocks=num_blocks, block_size_tokens=block_size, enable_prefix_caching=True
    )


def admit_in_one_step(manager: KVCacheManager, request: Request) -> int:
    """Admit the request, compute its whole prompt, and return the tokens found in the cache."""
    prefix = manager.get_computed(request)
    assert manager.allocate(request, prefix, num_new_tokens=len(request.token_ids) - prefix.num_tokens)
    request.num_computed_tokens = len(request.token_ids)
    manager.computed(request)
    manager.end_step()
    return prefix.num_tokens


def decode_in_one_step(manager: KVCacheManager, request: Request, token: int) -> bool:
    request.token_ids.append(TokenId(token))
    if not manager.append(request, num_new_tokens=1):
        request.token_ids.pop()
        return False
    request.num_computed_tokens += 1
    manager.computed(request)
    manager.end_step()
    return True


def key_of(manager: PartialKVCacheManager, request: Request, *, end: int) -> list[int]:
    """Return the blocks that are cached under the key of the request's block that ends at `end`."""
    index = (end - 1) // manager.block_size_tokens
    chain = list(request.block_hashes[:index])
    hasher = BlockHasher(CacheOptions().hash_algorithm, block_size_tokens=manager.block_size_tokens)
    name = hasher.name(chain, request.token_ids, end=end, scope=request.scope)
    return list(manager.pool.find_all(name))


def test_000_2_a_partial_block_is_rekeyed_as_it_grows() -> None:
    manager = partial_manager()
    request = request_of(list(range(46)))  # two full blocks and one of 14
    admit_in_one_step(manager, request)
    table = [block.block_id for block in manager.table(request.request_id)]
    assert [key_of(manager, request, end=end) for end in (16, 32, 46)] == [[table[0]], [table[1]], [table[2]]]

    decode_in_one_step(manager, request, 900)
    assert key_of(manager, request, end=46) == []
    assert key_of(manager, request, end=47) == [table[2]]

    decode_in_one_step(manager, request, 901)  # this fills the block
    decode_in_one_step(manager, request, 902)  # this is the first token of a new partial block
    assert key_of(manager, request, end=47) == []
    assert key_of(manager, request, end=48) == [table[2]]
    fourth = manager.table(request.request_id)[3].block_id
    assert key_of(manager, request, end=49) == [fourth]
    manager.check_integrity()


class Trie:
    """A simple dictionary of every prefix that was ever computed, for each scope."""

    def __init__(self) -> None:
        self.prefixes: dict[tuple[str, tuple[int, ...]], None] = {}

    def add(self, salt: str, tokens: list[int], *, known: int) -> None:
        for end in range(known + 1, len(tokens) + 1):
            self.prefixes[salt, tuple(tokens[:end])] = None

    def longest(self, salt: str, tokens: list[int]) -> int:
        end = 0
        while end < len(tokens) - 1 and (salt, tuple(tokens[: end + 1])) in self.prefixes:
            end += 1
        return end


@pytest.mark.slow
def test_000_2_hits_equal_those_of_a_naive_dictionary_of_prefixes() -> None:
    rng, manager, trie = random.Random(5), partial_manager(40_000, block_size=4), Trie()
    live: list[Request] = []
    hits = hit_tokens = copies = 0
    for operation in range(10_000):
        chance = rng.random()
        if chance < 0.4 or not live:
            salt = rng.choice(["", "", "s"])
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 22))]
            request = request_of(tokens, salt=salt)
            expected = trie.longest(salt, tokens)
            assert admit_in_one_step(manager, request) == expected, f"operation {operation}"
            trie.add(salt, tokens, known=expected)
            hits += expected > 0
            hit_tokens += expected
            live.append(request)
        elif chance < 0.75:
            request = rng.choice(live)
            known = len(request.token_ids)
            assert decode_in_one_step(manager, request, rng.randrange(3))
            trie.add(request.cache_salt, [int(t) for t in request.token_ids], known=known)
        else:
            manager.free(live.pop(rng.randrange(len(live))))
        copies += len(manager.take_copies())
        if operation % 500 == 0:
            manager.check_integrity()
    assert hits > 1000
    print(
        f"\n000-2: 10,000 operations, {hits} hits of {hit_tokens} tokens, {copies} copies: same as the dictionary"
    )


def test_a_free_tail_that_ends_where_the_match_ends_is_continued_in_place() -> None:
    manager = partial_manager()
    first = request_of(list(range(10)))
    admit_in_one_step(manager, first)
    [block] = manager.table(first.request_id)
    manager.free(first)
    second = request_of(list(range(14)))
    assert admit_in_one_step(manager, second) == 10
    assert list(manager.table(second.request_id)) == [block]
    assert manager.take_copies() == ()
    manager.check_integrity()


@pytest.mark.parametrize("held", [True, False])
def test_a_tail_in_use_is_copied_as_far_as_it_matches(*, held: bool) -> None:
    manager = partial_manager()
    first = request_of(list(range(10)))
    admit_in_one_step(manager, first)
    [source] = manager.table(first.request_id)
    if not held:
        manager.free(first)
    second = request_of([*range(10)] if held else [*range(7), 99, 98])
    found = 9 if held else 7
    assert admit_in_one_step(manager, second) == found
    [copy] = manager.take_copies()
    assert (copy.source, copy.target, copy.num_tokens) == (source, manager.table(second.request_id)[0], found)
    assert source is not copy.target
    manager.check_integrity()


def test_among_equal_matches_the_tail_that_was_cached_first_is_served() -> None:
    manager = partial_manager()
    first, second = request_of([1, 2, 3, 4]), request_of([1, 2, 3, 5])
    admit_in_one_step(manager, first)
    admit_in_one_step(manager, second)
    tails = [manager.table(request.request_id)[0] for request in (first, second)]
    assert manager.get_computed(request_of([1, 2, 3, 9])).tail is tails[0]
    assert manager.get_computed(request_of([1, 2, 3, 5, 9])).tail is tails[1]


def test_blocks_know_the_length_of_their_prefix() -> None:
    manager = partial_manager()
    request = request_of(list(range(40)))
    admit_in_one_step(manager, request)
    assert [block.prefix_blocks for block in manager.table(request.request_id)] == [1, 2, 3]


def test_a_tail_that_a_step_is_still_computing_is_not_copied_in_that_step() -> None:
    manager = partial_manager()
    first, second = request_of(list(range(30))), request_of(list(range(30)))
    prefix = manager.get_computed(first)
    assert manager.allocate(first, prefix, num_new_tokens=30)
    # the full block may be shared, but not yet its tail
    assert manager.get_computed(second).num_tokens == 16
    first.num_computed_tokens = 30
    manager.computed(first)
    assert manager.get_computed(second).num_tokens == 29


def test_after_an_aborted_step_a_block_that_is_continued_has_no_wrong_key() -> None:
    manager = partial_manager()
    first = request_of(list(range(16)))
    prefix = manager.get_computed(first)
    assert manager.allocate(first, prefix, num_new_tokens=10)
    first.num_computed_tokens = 10
    manager.computed(first)
    assert manager.append(first, num_new_tokens=6)  # the block now has its full key
    manager.free(first)  # the step is never finished
    second = request_of([*range(10), *range(50, 60)])
    assert admit_in_one_step(manager, second) == 10
    third = request_of(list(range(17)))
    wrong = manager.table(second.request_id)[0]
    assert wrong not in manager.get_computed(third).blocks
    manager.check_integrity()


def test_scopes_do_not_match_each_others_tails() -> None:
    manager = partial_manager()
    admit_in_one_step(manager, request_of(list(range(10)), salt="a"))
    for other in (
        request_of(list(range(10)), salt="b"),
        request_of(list(range(10))),
        request_of(list(range(10)), adapter=Adapter("a")),
    ):
        assert manager.get_computed(other).num_tokens == 0


def test_eviction_and_reset_also_remove_listings() -> None:
    manager = partial_manager(4)
    first = request_of(list(range(40)))
    admit_in_one_step(manager, first)
    manager.free(first)
    other = request_of(list(range(1000, 1040)))
    admit_in_one_step(manager, other)  # This evicts from the tail.
    manager.check_integrity()
    assert manager.get_computed(request_of(list(range(40)))).num_tokens == 16
    manager.reset_prefix_cache()
    manager.check_integrity()
    assert manager.get_computed(request_of(list(range(40)))).num_tokens == 0
