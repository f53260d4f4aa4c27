"""KV events as several releases of vLLM send them, and messages that are not KV events."""

import tracemalloc

import msgspec
import pytest

from epp.sources.kvevents.decoding import Cleared, KvEvent, Removed, Stored, decode
from tests.contract.recordings import read_kv_events


def event_batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def decoded(payload: bytes) -> list[KvEvent]:
    events = decode(payload)
    assert events is not None
    return events


def test_recorded_messages_of_vllm_are_decoded_as_plain_decoder_reads_them() -> None:
    found = 0
    for recorded in read_kv_events("sha256").batches:
        for event, plain in zip(decoded(recorded.payload), recorded.events(), strict=True):
            assert (
                type(event).__name__
                == {
                    "BlockStored": "Stored",
                    "BlockRemoved": "Removed",
                    "AllBlocksCleared": "Cleared",
                }[plain["type"]]
            )
            if isinstance(event, Stored):
                begins = plain["parent_block_hash"] is None and not plain["lora_name"]
                assert not event.plain_tokens or (begins and list(event.plain_tokens) == plain["token_ids"])
                found += bool(event.plain_tokens)
    assert found > 5


def test_maps_and_arrays_of_older_releases_are_read_alike() -> None:
    as_map = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": 6,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
    }
    stored = Stored((7, 8), 1)  # type: ignore[arg-type]  # plain numbers as names
    assert decode(event_batch(as_map)) == [stored]
    assert decode(event_batch(["BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, None, "CPU"])) == [stored]
    removed = Removed((7,), 0)  # type: ignore[arg-type]  # as above
    assert decode(event_batch(["BlockRemoved", [7]], ["AllBlocksCleared"])) == [removed, Cleared()]


def test_arrays_have_the_fields_that_releases_have_added_at_their_end() -> None:
    array = ["BlockStored", [7], None, [1, 2], 2, 1, "GPU", "sql", [["sql"]], 1, "sliding_window"]
    names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
    names += ["lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"]
    for length in range(6, len(names) + 1):
        as_map = dict(zip(names[:length], array, strict=False))
        assert decode(event_batch(array[:length])) == decode(event_batch(as_map))
    assert decode(event_batch([*array, "a later field"])) == decode(event_batch(array))
    assert decode(event_batch(["BlockRemoved", [7], "GPU", 1])) == [Removed((7,), 0, 1)]  # type: ignore[arg-type]  # a plain number as a name


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, 0),
        ("GPU", 0),
        ("cpu", 1),
        ("STORAGE", 2),
        ("TAPE", 2),
    ],
)
def test_an_unknown_medium_counts_as_storage(medium: str | None, tier: int) -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}
    assert decode(event_batch(event)) == [Removed((1,), tier)]  # type: ignore[arg-type]  # a plain number as a name


def test_long_hashes_are_shortened_to_their_last_eight_bytes() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [bytes(24) + (5).to_bytes(8, "big")], "medium": "GPU"}
    assert decode(event_batch(event)) == [Removed((5,), 0)]  # type: ignore[arg-type]  # a plain number as a name


def test_unknown_events_are_skipped() -> None:
    assert decode(event_batch({"type": "BlockMoved", "whatever": 1}, ["BlockSwapped", 1])) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"ts": 1.0}),
        event_batch(7),
        event_batch({"type": "BlockStored"}),
        event_batch({"type": "BlockStored", "block_hashes": ["x"], "token_ids": [1]}),
        event_batch({"type": "BlockStored", "block_hashes": [1], "token_ids": 7}),
        event_batch({"type": "BlockRemoved", "block_hashes": 3}),
        event_batch({"type": "BlockStored", "block_hashes": [1], "token_ids": [float("nan")]}),
        event_batch({"type": "BlockStored", "block_hashes": [1], "token_ids": [-1]}),
        event_batch(
            {"type": "BlockRemoved", "block_hashes": [1]}, {"type": "BlockRemoved", "block_hashes": [[1]]}
        ),
        b"\x93\x00" + b"\x91" * 100_000,  # nested without end
        b"\x93\x00\xdd\xff\xff\xff\xff",  # an array of four billion events
        event_batch({"type": ["BlockRemoved"], "block_hashes": [1]}),
        event_batch({"type": "BlockRemoved", "block_hashes": [1], "medium": ["GPU"]}),
        event_batch({"type": "BlockStored", "block_hashes": [1], "group_idx": "0"}),
    ],
)
def test_bytes_that_are_not_a_batch_of_events_are_refused(payload: bytes) -> None:
    assert decode(payload) is None


def many(item: bytes, *, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


LARGE = 2**20 - 100
STORED = b"\x82\xa4type\xabBlockStored"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x92\x00" + many(b"\x90", count=LARGE),
        b"\x92\x00" + many(b"\x80", count=LARGE),
        b"\x92" + many(b"\x90", count=LARGE) + b"\x90",
        b"\x92\x00\x91" + many(b"\x90", count=LARGE),
        b"\x92\x00\x91" + STORED + b"\xa1x" + many(b"\x90", count=LARGE),
        b"\x92\x00\x91" + STORED + b"\xacblock_hashes" + many(b"\x01", count=LARGE),
        b"\x92\x00\x91" + STORED + b"\xa9token_ids" + many(b"\x01", count=LARGE),
        b"\x92\x00\x91\x83" + STORED[1:] + b"\xacblock_hashes\x90\xaaextra_keys" + many(b"\x90", count=LARGE),
    ],
    ids=["events", "maps", "time", "event", "unknown", "hashes", "tokens", "keys"],
)
def test_a_message_makes_no_more_objects_than_events_need(payload: bytes) -> None:
    """A megabyte of empty lists once held the picker for 350 ms and took 64 MB."""
    assert len(payload) < 2**20
    tracemalloc.start()
    try:
        assert not decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_as_many_events_as_a_server_sends_are_read() -> None:
    removed = [{"type": "BlockRemoved", "block_hashes": [2**63 + n], "medium": "GPU"} for n in range(20_000)]
    assert len(decoded(event_batch(*removed))) == 20_000
    stored = {"type": "BlockStored", "block_hashes": [2**63] * 12_000, "token_ids": [100_000] * 192_000}
    (event,) = decoded(event_batch({**stored, "block_size": 16, "extra_keys": [["salt"], *[None] * 11_999]}))
    assert isinstance(event, Stored)
    assert (len(event.blocks), event.plain_tokens) == (12_000, ())
    (event,) = decoded(event_batch(stored))
    assert isinstance(event, Stored)
    assert len(event.plain_tokens) == 192_000


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"extra_keys": [None]}, True),
        ({"extra_keys": [[]]}, True),
        ({"extra_keys": []}, True),
        ({"extra_keys": [["a"]]}, False),
        ({"extra_keys": [["x" * 9999]]}, False),
        ({"lora_name": "sql"}, False),
        ({"parent_block_hash": 7}, False),
    ],
)
def test_tokens_are_read_if_nothing_else_names_the_first_block_of_a_prompt(
    fields: dict[str, object], *, plain: bool
) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, **fields}
    (stored,) = decoded(event_batch(event))
    assert stored == Stored((1,), plain_tokens=(1,) if plain else ())  # type: ignore[arg-type]  # a plain number as a name
