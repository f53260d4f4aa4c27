"""Our KV events are the same as vLLM's, byte for byte: vLLM's recorded messages pass through our classes, and
our messages through vLLM's. Our KV cache against vLLM's own KVCacheManager on 100 random traces: hits,
blocks, refusals, order of eviction.
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.hashing import BlockHasher, HashAlgorithm
from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Adapter, Request, RequestId, RequestState, TokenId
from model_server.server.kv_events import BlockStored, KvEventBatch, KvEventLog, decode_batch, encode_batch
from tests.contract.kv_cache_traces import (
    SCOPES,
    Admit,
    Free,
    Go,
    Outcome,
    Step,
    Trace,
    order_digest,
    read,
    sampled_token,
)
from tests.contract.recordings import KvEventRecording, RecordedRequest, read_kv_events
from tests.vllm_env.environment import VllmEnvironment

VLLM_DECODER = """
import json, logging, sys
logging.disable()
import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

decoder = msgspec.msgpack.Decoder(KVEventBatch)
encoder = msgspec.msgpack.Encoder()
for line in sys.stdin:
    payload = bytes.fromhex(line)
    batch = decoder.decode(payload)
    print(json.dumps({
        "events": [[type(e).__name__, msgspec.to_builtins(e)] for e in batch.events],
        "rank": batch.data_parallel_rank,
        "same_bytes": encoder.encode(batch) == payload,
    }))
"""


def test_recorded_messages_decoded_and_encoded_again_are_the_same_bytes(recording: KvEventRecording) -> None:
    for batch in recording.batches:
        assert encode_batch(decode_batch(batch.payload)) == batch.payload


def serve(cache: KVCacheManager, request: RecordedRequest, number: int) -> None:
    """Do what the recorded server did with the request, as far as its cache is concerned."""
    adapter = None if request.model == "tiny" else Adapter(request.model, request.model)
    own = Request(
        request_id=RequestId(str(number)),
        token_ids=[TokenId(token) for token in request.prompt_token_ids],
        max_tokens=len(request.answer_token_ids),
        arrival_s=0.0,
        adapter=adapter,
        cache_salt=request.cache_salt or "",
    )
    prefix = cache.get_computed(own)
    assert cache.allocate(own, prefix, num_new_tokens=own.num_prompt_tokens - prefix.num_tokens)
    own.state = RequestState.RUNNING
    own.num_computed_tokens = own.num_prompt_tokens
    for token in request.answer_token_ids[:-1]:
        own.token_ids.append(TokenId(token))
        assert cache.append(own, num_new_tokens=1)
        own.num_computed_tokens += 1
    cache.free(own)


def own_messages(recording: KvEventRecording, *, num_blocks: int) -> Iterator[bytes]:
    """Return our cache's messages for the recorded requests, one for each, between the recording's two
    resets.
    """
    algorithm: HashAlgorithm = "sha256" if recording.hash_algorithm == "sha256" else "sha256_cbor"
    cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size_tokens=recording.block_tokens,
        enable_prefix_caching=True,
        options=CacheOptions(hash_algorithm=algorithm, hash_seed=recording.hash_seed),
    )
    log = cache.observer = KvEventLog(block_size_tokens=recording.block_tokens)
    cache.reset_prefix_cache()
    *requests, last = recording.requests
    for number, request in enumerate(requests):
        serve(cache, request, number)
        yield from payload(log)
    cache.reset_prefix_cache()
    serve(cache, last, len(requests))
    yield from payload(log)


def payload(log: KvEventLog) -> Iterator[bytes]:
    message = log.take(wall_time_s=1.0)
    if message is not None:
        yield message.payload


def plain(event: object) -> Any:
    return msgspec.to_builtins(event)


def test_the_same_requests_give_the_same_events_as_vllm_in_the_same_order(
    recording: KvEventRecording,
) -> None:
    """The events agree in hashes, parents, tokens, adapters, extra keys and resets. With 64 blocks they also
    agree in evictions. vLLM keeps one block for itself.
    """
    num_blocks = {"sha256": 63, "sha256_cbor": 2047}[recording.hash_algorithm]
    ours = [e for p in own_messages(recording, num_blocks=num_blocks) for e in decode_batch(p).events]
    theirs = [e for b in recording.batches for e in decode_batch(b.payload).events]
    assert merged(ours) == merged(theirs)


def merged(events: list[Any]) -> list[Any]:
    """Prompt and answer may come as one event or as two: a stored chain is joined where it continues."""
    out: list[dict[str, Any]] = []
    for event in map(plain, events):
        before = out[-1] if out else None
        if (
            before is not None
            and before["type"] == event["type"] == BlockStored.__name__
            and event["parent_block_hash"] == before["block_hashes"][-1]
            and event["lora_name"] == before["lora_name"]
        ):
            for field in ("block_hashes", "token_ids", "extra_keys"):
                before[field] = [*before[field], *event[field]]
        else:
            listed = ("block_hashes", "token_ids", "extra_keys")
            out.append({k: list(v) if k in listed else v for k, v in event.items()})
    return out


@pytest.mark.vllm
def test_vllms_own_classes_read_ours_and_would_have_written_the_same_bytes(
    vllm_environment: VllmEnvironment,
) -> None:
    recording = read_kv_events("sha256")
    sent = [*own_messages(recording, num_blocks=64)]
    run = subprocess.run(
        [vllm_environment.python, "-c", VLLM_DECODER],
        input="\n".join(message.hex() for message in sent),
        capture_output=True,
        text=True,
        check=True,
    )
    read = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"events"')]
    assert len(read) == len(sent)
    for message, theirs in zip(sent, read, strict=True):
        batch: KvEventBatch = decode_batch(message)
        assert theirs["same_bytes"]
        assert theirs["rank"] == 0
        assert theirs["events"] == [
            [type(e).__name__, json.loads(json.dumps(plain(e)))] for e in batch.events
        ]
    names = {name for theirs in read for name, _ in theirs["events"]}
    assert names == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    media = {event.get("medium") for theirs in read for _, event in theirs["events"]}
    assert media == {"GPU", None}


class OurSide:
    """One of our caches with its live requests."""

    def __init__(self, trace: Trace, options: CacheOptions) -> None:
        self.manager = KVCacheManager(
            num_blocks=trace.num_blocks,
            block_size_tokens=trace.block_tokens,
            enable_prefix_caching=True,
            options=options,
        )
        self.hasher = BlockHasher(options.hash_algorithm, block_size_tokens=trace.block_tokens)
        self.requests: dict[int, Request] = {}
        self.last_hashes: list[str] = []

    def step(self, step: Step) -> Outcome:
        match step:
            case Admit():
                hit_tokens, new_blocks = self._admit(len(self.last_hashes), step)
            case Go():
                hit_tokens, new_blocks = -1, self._go(step)
            case Free():
                self.manager.free(self.requests.pop(step.request))
                hit_tokens, new_blocks = -1, []
        self.manager.end_step()
        return Outcome(hit_tokens, new_blocks, order_digest(self.manager.pool.free_in_order()))

    def _admit(self, number: int, step: Admit) -> tuple[int, list[int] | None]:
        name, path, salt = SCOPES[step.prompt.scope]
        request = Request(
            request_id=RequestId(str(number)),
            token_ids=[TokenId(t) for t in step.prompt.tokens()],
            max_tokens=10_000,
            arrival_s=0.0,
            adapter=Adapter(name, path) if name else None,
            cache_salt=salt,
        )
        prefix = self.manager.get_computed(request)
        new_tokens = min(len(request.token_ids) - prefix.num_tokens, step.budget_tokens)
        done = self.manager.allocate(request, prefix, num_new_tokens=new_tokens)
        self._note_last_hash(request)
        if not done:
            return prefix.num_tokens, None
        request.num_computed_tokens = prefix.num_tokens + new_tokens
        self.requests[number] = request
        table = self.manager.table(request.request_id)
        return prefix.num_tokens, [block.block_id for block in table[len(prefix.blocks) :]]

    def _go(self, step: Go) -> list[int] | None:
        request = self.requests[step.request]
        if not request.num_uncomputed_tokens:
            request.token_ids.append(TokenId(sampled_token(step.request, len(request.token_ids))))
        new_tokens = min(request.num_uncomputed_tokens, step.budget_tokens)
        before = len(self.manager.table(request.request_id))
        if not self.manager.append(request, num_new_tokens=new_tokens):
            return None
        request.num_computed_tokens += new_tokens
        return [block.block_id for block in self.manager.table(request.request_id)[before:]]

    def _note_last_hash(self, request: Request) -> None:
        num_full = len(request.token_ids) // self.manager.block_size_tokens
        chain = list(request.block_hashes)
        self.hasher.extend(chain, request.token_ids, num_blocks=num_full, scope=request.scope)
        self.last_hashes.append(chain[-1].hex()[:8] if chain else "")


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return read()


@pytest.mark.slow
def test_001_2_hits_blocks_and_eviction_order_equal_those_of_vllm(traces: list[Trace]) -> None:
    assert len(traces) >= 100
    for number, trace in enumerate(traces):
        side = OurSide(trace, CacheOptions())
        for at, (step, expected) in enumerate(zip(trace.steps, trace.outcomes, strict=True)):
            assert side.step(step) == expected, f"trace {number}, step {at}: {step}"
        side.manager.check_integrity()
        assert side.last_hashes == trace.last_hashes, f"trace {number}"
    outcomes = [outcome for trace in traces for outcome in trace.outcomes]
    print(
        f"\n001-2: {len(traces)} traces, {len(outcomes)} steps, "
        f"{sum(o.hit_tokens > 0 for o in outcomes)} hits, {sum(o.new_blocks is None for o in outcomes)} refusals: same"
    )


def test_the_traces_contain_hits_refusals_and_evictions() -> None:
    outcomes = [outcome for trace in read() for outcome in trace.outcomes]
    assert sum(outcome.hit_tokens > 0 for outcome in outcomes) > 300
    assert sum(outcome.new_blocks is None for outcome in outcomes) > 500
