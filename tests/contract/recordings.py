"""Reads the recordings of a real vLLM that `python -m tests.environments vllm record` writes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

DATA_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that was sent while events were recorded, in the order in which it was sent."""

    model: str
    cache_salt: str | None
    prompt: str
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]

    @property
    def computed_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that have an entry in the KV cache: the last token of the answer was sampled and
        never fed back.
        """
        return (*self.prompt_token_ids, *self.answer_token_ids[:-1])


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One message of the KV event publisher."""

    topic: str
    sequence: int
    payload: bytes
    """msgpack: [timestamp, [event, ...], data parallel rank];
    each event is a map with its name under "type"."""

    def events(self) -> list[dict[str, Any]]:
        _timestamp, events, _rank = msgspec.msgpack.decode(self.payload)
        assert isinstance(events, list)
        return events


@dataclass(frozen=True, slots=True)
class KvEventRecording:
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    requests: tuple[RecordedRequest, ...]
    batches: tuple[RecordedBatch, ...]

    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch.events()]


def read_text(name: str) -> str:
    return (DATA_FOLDER / name).read_text()


def read_kv_events(hash_algorithm: str) -> KvEventRecording:
    """Return the recording of `sha256` (a cache of 64 blocks that evicts) or `sha256_cbor` (2,048 blocks)."""
    raw = json.loads(read_text(f"kv_events_{hash_algorithm}.json"))
    requests = [
        RecordedRequest(
            model=request["model"],
            cache_salt=request["cache_salt"],
            prompt=request["prompt"],
            prompt_token_ids=tuple(request["prompt_token_ids"]),
            answer_token_ids=tuple(request["answer_token_ids"]),
        )
        for request in raw["requests"]
    ]
    batches = [
        RecordedBatch(
            topic=batch["topic"], sequence=batch["sequence"], payload=bytes.fromhex(batch["payload_hex"])
        )
        for batch in raw["batches"]
    ]
    return KvEventRecording(
        hash_algorithm=raw["hash_algorithm"],
        hash_seed=raw["hash_seed"],
        block_tokens=raw["block_tokens"],
        requests=tuple(requests),
        batches=tuple(batches),
    )
