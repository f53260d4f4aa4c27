"""The KV cache manager and its block pool, step by step."""

from model_server.core.block_pool import BlockId
from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Request, RequestState, TokenId
from tests.harness.engine_requests import block_ids, request_of


def manager_of(num_blocks: int, *, block_size: int = 16, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size_tokens=block_size, enable_prefix_caching=caching)


def admit(manager: KVCacheManager, request: Request) -> int:
    """Admit with the whole prompt at once. Return the tokens found in the cache."""
    computed = manager.get_computed(request)
    hit_tokens = computed.num_tokens
    assert manager.allocate(request, computed, num_new_tokens=len(request.token_ids) - hit_tokens)
    request.state = RequestState.RUNNING
    request.num_computed_tokens = len(request.token_ids)
    manager.check_integrity()
    return hit_tokens


def decode(manager: KVCacheManager, request: Request, token: int) -> None:
    """Sample one token and compute it."""
    request.token_ids.append(TokenId(token))
    assert manager.append(request, num_new_tokens=1)
    request.num_computed_tokens += 1
    manager.check_integrity()


def test_001_1_equal_requests_keep_duplicate_blocks_and_share_the_first() -> None:
    """Document 001's timeline: two equal prompts of 62 tokens, greedy, the second admitted one step later."""
    manager = manager_of(10)
    first, second = request_of(62), request_of(62)

    assert admit(manager, first) == 0  # time 1
    assert block_ids(manager, first) == [0, 1, 2, 3]

    decode(manager, first, 900)  # time 2: 15 of 16 slots of block 3
    assert admit(manager, second) == 48
    assert block_ids(manager, second) == [0, 1, 2, 4]  # partial blocks are not shared

    decode(manager, first, 901)  # time 3: block 3 is full
    decode(manager, second, 900)
    assert manager.pool.find_all(first.block_hashes[3]) == (BlockId(3),)

    decode(manager, second, 901)  # time 4: block 4 is full and holds the same
    assert first.block_hashes == second.block_hashes
    copies = [list(manager.pool.find_all(name)) for name in first.block_hashes]
    assert copies == [[0], [1], [2], [3, 4]]

    third = request_of(62)
    third.token_ids += [TokenId(900), TokenId(901), TokenId(902)]
    assert admit(manager, third) == 64
    assert block_ids(manager, third)[:4] == [0, 1, 2, 3]

    manager.free(second)
    manager.check_integrity()
    assert manager.pool.free_in_order()[-1] == 4  # only the copy of this request became free


def test_001_3_the_least_recently_freed_tail_is_evicted_first() -> None:
    manager = manager_of(6)
    old, new = request_of(48), request_of(48, first=1000)
    admit(manager, old)
    admit(manager, new)
    manager.free(old)
    manager.free(new)
    assert manager.pool.free_in_order() == [2, 1, 0, 5, 4, 3]
    admit(manager, request_of(32, first=2000))  # evicts the two last blocks of the old sequence
    again = request_of(49)
    assert len(manager.get_computed(again).blocks) == 1


def test_001_5_hits_that_wait_in_the_free_queue_do_not_count_as_free() -> None:
    """From the review of document 001: a request wants three blocks, two of them are cached, and only
    those two are free.
    """
    manager = manager_of(3)
    earlier = request_of(32)
    admit(manager, earlier)
    blocker = request_of(8, first=1000)
    admit(manager, blocker)
    manager.free(earlier)
    assert manager.pool.num_free == 2

    wanted = request_of(48)
    computed = manager.get_computed(wanted)
    assert len(computed.blocks) == 2
    before = manager.pool.free_in_order()
    assert not manager.allocate(wanted, computed, num_new_tokens=16)
    assert manager.pool.free_in_order() == before
    manager.check_integrity()

    manager.free(blocker)
    assert manager.allocate(wanted, computed, num_new_tokens=16)
    assert manager.pool.num_free == 0
    manager.check_integrity()


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = manager_of(20, caching=False)
    admit(manager, request_of(64))
    assert admit(manager, request_of(64)) == 0


def test_blocks_that_another_server_computed_are_found_as_our_own_are() -> None:
    manager = manager_of(10)
    prompt = request_of(62)
    assert manager.take_in(prompt, end_block=3) == 3
    manager.check_integrity()
    assert manager.pool.num_free == 10  # nobody holds them
    assert admit(manager, request_of(62)) == 48


def test_blocks_from_another_server_take_only_the_room_that_is_free() -> None:
    manager = manager_of(4)
    admit(manager, request_of(30, first=1000))  # two blocks are held
    prompt = request_of(80)
    assert manager.take_in(prompt, end_block=4) == 2
    manager.check_integrity()
    assert (
        manager.take_in(prompt, end_block=4) == 2
    )  # the end of the prompt does not evict the prompt's own beginning
    manager.check_integrity()


def test_blocks_from_another_server_join_those_that_are_here() -> None:
    manager = manager_of(10)
    first = request_of(33)
    admit(manager, first)
    manager.free(first)
    assert manager.take_in(request_of(62), end_block=3) == 3
    manager.check_integrity()
    assert manager.pool.num_unused == 3
