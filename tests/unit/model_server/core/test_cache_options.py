"""Blocks that are allocated before they are needed, and wrong options."""

from __future__ import annotations

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.kv_cache import CachedPrefix, KVCacheManager
from model_server.core.partial_cache import make_manager
from model_server.core.request import Request, TokenId
from tests.harness.engine_requests import block_ids, request_of


def manager_of_options(num_blocks: int, options: CacheOptions | None = None) -> KVCacheManager:
    return make_manager(
        num_blocks=num_blocks,
        block_size_tokens=16,
        enable_prefix_caching=True,
        options=options or CacheOptions(),
    )


def admit_alone(manager: KVCacheManager, request: Request) -> None:
    assert manager.allocate(request, CachedPrefix((), 0), num_new_tokens=len(request.token_ids))
    request.num_computed_tokens = len(request.token_ids)
    manager.computed(request)


def decode_if_room(manager: KVCacheManager, request: Request, token: int) -> bool:
    request.token_ids.append(TokenId(token))
    done = manager.append(request, num_new_tokens=1)
    if done:
        request.num_computed_tokens += 1
        manager.computed(request)
    manager.check_integrity()
    return done


def test_preallocated_blocks_are_used_before_new_blocks() -> None:
    manager = manager_of_options(10, CacheOptions(preallocated_blocks=2))
    request = request_of(20)
    admit_alone(manager, request)
    assert block_ids(manager, request) == [0, 1, 2, 3]
    for token in range(44):
        assert decode_if_room(manager, request, token)
    assert block_ids(manager, request) == [0, 1, 2, 3]
    assert decode_if_room(manager, request, 99)
    assert block_ids(manager, request) == [0, 1, 2, 3, 4, 5, 6]
    manager.free(request)
    manager.check_integrity()
    # Blocks that were never filled go first, the tail before the rest. Blocks that were never used come
    # next, and blocks that can be found again come last.
    assert manager.pool.free_in_order() == [6, 5, 4, 7, 8, 9, 3, 2, 1, 0]


def test_preallocation_takes_only_blocks_that_are_left_over() -> None:
    manager = manager_of_options(3, CacheOptions(preallocated_blocks=5))
    request = request_of(32)
    admit_alone(manager, request)
    assert block_ids(manager, request) == [0, 1, 2]
    other = request_of(8, first=500)
    assert not manager.allocate(other, manager.get_computed(other), num_new_tokens=8)
    manager.check_integrity()


def test_blocks_over_the_bound_on_unused_blocks_are_emptied_and_not_lost() -> None:
    manager = manager_of_options(10, CacheOptions(max_unused_blocks=2))
    request = request_of(80)
    admit_alone(manager, request)
    manager.free(request)
    manager.check_integrity()
    assert (manager.pool.num_unused, manager.pool.num_free) == (2, 10)
    assert manager.get_computed(request_of(80)).num_tokens == 32


@pytest.mark.parametrize(
    "wrong",
    [
        {"hash_algorithm": "md5"},
        {"eviction": "fifo"},
        {"preallocated_blocks": -1},
        {"max_unused_blocks": -1},
    ],
)
def test_invalid_options_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"|".join(str(part) for item in wrong.items() for part in item)):
        CacheOptions(**wrong)  # type: ignore[arg-type]  # as from a command line
