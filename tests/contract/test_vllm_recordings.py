"""The recordings contain what the picker and the model server take from a real vLLM.
Only parsers run here.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from tests.contract.recordings import (
    DATA_FOLDER,
    KvEventRecording,
    RecordedRequest,
    read_json,
    read_kv_events,
    read_stream,
)
from tests.contract.vllm_block_hashes import block_hashes, canonical_cbor, event_hash

MODEL = "tiny"
ADAPTERS = {"alpha", "beta"}


def expected_hashes(recording: KvEventRecording, request: RecordedRequest) -> list[bytes]:
    # The server ran in the folder that holds the adapters, so an adapter's path is its name. There are
    # two string objects and not one, because pickle writes the second mention of the same object as a
    # reference, which gives another hash.
    path = "".join(list(request.model))
    return block_hashes(
        request.computed_token_ids,
        algorithm=recording.hash_algorithm,
        seed=recording.hash_seed,
        block_tokens=recording.block_tokens,
        adapter=None if request.model == MODEL else (request.model, path),
        cache_salt=request.cache_salt,
    )


def test_stored_blocks_are_the_full_blocks_of_the_requests_under_the_hashes_the_rule_gives(
    recording: KvEventRecording,
) -> None:
    parent_of: dict[int, int | None] = {}
    tokens_of: dict[int, tuple[int, ...]] = {}
    for request in recording.requests:
        hashes = [event_hash(h) for h in expected_hashes(recording, request)]
        parent_of |= dict(zip(hashes, [None, *hashes], strict=False))
        size = recording.block_tokens
        blocks = [request.computed_token_ids[i * size : (i + 1) * size] for i in range(len(hashes))]
        tokens_of |= dict(zip(hashes, blocks, strict=True))

    stored = [event for event in recording.events() if event["type"] == "BlockStored"]
    for event in stored:
        size = event["block_size"]
        assert size == recording.block_tokens
        assert [event["parent_block_hash"], *event["block_hashes"]][:-1] == [
            parent_of[h] for h in event["block_hashes"]
        ]
        tokens = tuple(token for h in event["block_hashes"] for token in tokens_of[h])
        assert tuple(event["token_ids"]) == tokens
    assert {h for event in stored for h in event["block_hashes"]} == tokens_of.keys()


def test_stored_blocks_name_their_adapter_and_salt(recording: KvEventRecording) -> None:
    stored = [event for event in recording.events() if event["type"] == "BlockStored"]
    assert {event["lora_name"] for event in stored} == {None, *ADAPTERS}
    for event in stored:
        blocks = len(event["block_hashes"])
        if event["lora_name"] is not None:
            assert event["extra_keys"] == [[event["lora_name"]]] * blocks
    salted = [event["extra_keys"] for event in stored if ["tenant-1"] in event["extra_keys"]]
    assert salted
    assert all(keys == [["tenant-1"], *[None] * (len(keys) - 1)] for keys in salted)


def test_replaying_the_events_leaves_the_blocks_of_the_last_request(recording: KvEventRecording) -> None:
    copies: Counter[int] = Counter()
    for event in recording.events():
        match event["type"]:
            case "BlockStored":
                copies.update(event["block_hashes"])
            case "BlockRemoved":
                copies.subtract(event["block_hashes"])
                assert all(copies[h] >= 0 for h in event["block_hashes"])
            case "AllBlocksCleared":
                copies.clear()
            case other:
                pytest.fail(f"unknown event {other}")
    last = [event_hash(h) for h in expected_hashes(recording, recording.requests[-1])]
    assert +copies == Counter(last)


def test_only_the_small_cache_evicts_and_the_tail_of_a_chain_goes_first() -> None:
    def removed(recording: KvEventRecording) -> list[int]:
        events = [event for event in recording.events() if event["type"] == "BlockRemoved"]
        return [h for event in events for h in event["block_hashes"]]

    assert removed(read_kv_events("sha256_cbor")) == []
    small = read_kv_events("sha256")
    evicted_at = {block: at for at, block in enumerate(removed(small))}
    chains = [[event_hash(h) for h in expected_hashes(small, request)] for request in small.requests]
    links = [pair for chain in chains for pair in pairwise(chain) if evicted_at.keys() >= set(pair)]
    assert len(links) > 30
    assert all(evicted_at[child] < evicted_at[parent] for parent, child in links)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (
            (0, 23, 24, 255, 256, 65535, 65536, 1 << 32),
            "8800171818 18ff 190100 19ffff 1a00010000 1b0000000100000000",
        ),
        ((b"\x01", "a", None), "83 4101 6161 f6"),
    ],
)
def test_canonical_cbor_takes_the_fewest_bytes(
    value: tuple[bytes | str | int | None, ...], encoded: str
) -> None:
    assert canonical_cbor(value).hex() == encoded.replace(" ", "")


@pytest.mark.parametrize("name", ["completion", "chat"])
def test_a_stream_ends_with_a_chunk_of_usage_alone_and_repeats_the_plain_answer_from_cache(name: str) -> None:
    plain, chunks = read_json(f"{name}.json"), read_stream(f"{name}_stream.sse")
    *content, last = chunks
    assert last["choices"] == []
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in content)
    [choice] = plain["choices"]
    parts = [chunk["choices"][0] for chunk in content]
    if name == "chat":
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
    else:
        assert "".join(part["text"] for part in parts) == choice["text"]
    prompt_tokens = plain["usage"]["prompt_tokens"]
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert last["usage"]["prompt_tokens"] == prompt_tokens
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 32 * 32


def test_errors_are_in_openai_shape_except_for_unknown_paths() -> None:
    records = {record["case"]: record for record in read_json("errors.json")}
    stray = records.pop("no such path")
    assert (stray["status"], stray["body"]) == (404, '{"detail":"Not Found"}')
    for case, record in records.items():
        error = read_error(record["body"])
        assert error["code"] == record["status"], case
        assert error["message"], case
    assert {case for case, record in records.items() if record["status"] == 404} == {
        "unknown model",
        "adapter without files",
        "adapter not loaded",
    }


def read_error(body: str) -> dict[str, object]:
    error = msgspec.json.decode(body)["error"]
    assert isinstance(error, dict)
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_models_lists_adapters_under_their_base_model() -> None:
    models = {model["id"]: model for model in read_json("models.json")["data"]}
    assert models.keys() == {MODEL, *ADAPTERS}
    assert models[MODEL]["parent"] is None
    assert all(models[adapter]["parent"] == MODEL for adapter in ADAPTERS)


def test_no_recording_names_a_path_of_the_machine_it_was_made_on() -> None:
    absolute = re.compile(rb"/(home|root|tmp|work|usr|var|opt|mnt|Users)/")
    files = sorted(DATA_FOLDER.iterdir())
    assert files
    for file in files:
        assert absolute.search(file.read_bytes()) is None, file.name
    for algorithm in ("sha256", "sha256_cbor"):
        for batch in read_kv_events(algorithm).batches:
            assert absolute.search(batch.payload) is None
