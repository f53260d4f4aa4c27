"""The messages that the event log makes of the cache's reports."""

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.hashing import event_hash
from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Adapter, Request, RequestId, RequestState, TokenId
from model_server.server.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventLog,
    decode_batch,
)

SIZE = 4


def cache_of(num_blocks: int, log: KvEventLog) -> KVCacheManager:
    cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size_tokens=SIZE,
        enable_prefix_caching=True,
        options=CacheOptions(hash_algorithm="sha256_cbor"),
    )
    cache.observer = log
    return cache


def compute(
    cache: KVCacheManager, *, first: int, num_tokens: int, adapter: str = "", salt: str = ""
) -> Request:
    """Admit, compute and free one prompt."""
    request = Request(
        request_id=RequestId(f"{first}/{num_tokens}/{adapter}/{salt}"),
        token_ids=[TokenId(first + i) for i in range(num_tokens)],
        max_tokens=1,
        arrival_s=0.0,
        adapter=Adapter(adapter, f"/{adapter}") if adapter else None,
        cache_salt=salt,
    )
    prefix = cache.get_computed(request)
    assert cache.allocate(request, prefix, num_new_tokens=num_tokens - prefix.num_tokens)
    request.state = RequestState.RUNNING
    request.num_computed_tokens = num_tokens
    cache.free(request)
    return request


def taken_events(log: KvEventLog) -> tuple[KvEvent, ...]:
    log.check_integrity()
    message = log.take(wall_time_s=5.0)
    log.check_integrity()
    if message is None:
        return ()
    batch = decode_batch(message.payload)
    assert (batch.ts, batch.data_parallel_rank) == (5.0, 0)
    return batch.events


def test_event_for_blocks_of_prompt_has_their_tokens_and_hash_before_them() -> None:
    log = KvEventLog(block_size_tokens=SIZE)
    cache = cache_of(10, log)
    first = compute(cache, first=100, num_tokens=9)
    second = compute(cache, first=100, num_tokens=14)
    hashes = [event_hash(name) for name in second.block_hashes]
    stored = {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None}
    kind = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert taken_events(log) == (
        BlockStored(
            block_hashes=tuple(hashes[:2]),
            parent_block_hash=None,
            token_ids=tuple(range(100, 108)),
            extra_keys=(None, None),
            **stored,  # type: ignore[arg-type]  # mixed values
            **kind,  # type: ignore[arg-type]  # mixed values
        ),
        BlockStored(
            block_hashes=(hashes[2],),
            parent_block_hash=event_hash(first.block_hashes[1]),
            token_ids=tuple(range(108, 112)),
            extra_keys=(None,),
            **stored,  # type: ignore[arg-type]  # mixed values
            **kind,  # type: ignore[arg-type]  # mixed values
        ),
    )
    assert taken_events(log) == ()


def test_an_adapter_is_named_in_each_block_and_a_salt_in_the_first() -> None:
    log = KvEventLog(block_size_tokens=SIZE)
    cache = cache_of(40, log)
    for adapter, salt in (("law", ""), ("style", "s"), ("law", "s"), ("", "s")):
        compute(cache, first=1, num_tokens=9, adapter=adapter, salt=salt)
    events = taken_events(log)
    assert [(e.lora_id, e.lora_name, e.extra_keys) for e in events if isinstance(e, BlockStored)] == [
        (1, "law", (("law",), ("law",))),
        (2, "style", (("style", "s"), ("style",))),
        (1, "law", (("law", "s"), ("law",))),
        (None, None, (("s",), None)),
    ]


def test_an_eviction_is_reported_before_the_block_that_takes_the_place() -> None:
    log = KvEventLog(block_size_tokens=SIZE)
    cache = cache_of(2, log)
    first = compute(cache, first=1, num_tokens=8)
    taken_events(log)
    compute(cache, first=50, num_tokens=8)
    tail, head = first.block_hashes[1], first.block_hashes[0]
    *removed, stored = taken_events(log)
    assert removed == [
        BlockRemoved((event_hash(tail),), "GPU", 0),
        BlockRemoved((event_hash(head),), "GPU", 0),
    ]
    assert isinstance(stored, BlockStored)


def test_a_reset_is_reported_alone_and_drops_unsent_events() -> None:
    log = KvEventLog(block_size_tokens=SIZE)
    cache = cache_of(10, log)
    compute(cache, first=1, num_tokens=8)
    cache.reset_prefix_cache()
    assert taken_events(log) == (AllBlocksCleared(),)


def test_the_newest_messages_are_kept_under_their_numbers() -> None:
    log = KvEventLog(block_size_tokens=SIZE, buffer_batches=3)
    cache = cache_of(100, log)
    for number in range(5):
        compute(cache, first=10 * number, num_tokens=4)
        taken_events(log)
    assert [message.sequence for message in log.since(0)] == [2, 3, 4]
    assert [message.sequence for message in log.since(4)] == [4]
    assert list(log.since(5)) == []


def test_a_negative_buffer_size_is_refused() -> None:
    with pytest.raises(ValueError, match="replay buffer"):
        KvEventLog(block_size_tokens=SIZE, buffer_batches=-1)
