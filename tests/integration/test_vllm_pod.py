"""A real vLLM with the arguments of the chart does what routing needs. The module has one server.
`lora-sync` runs on it too.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml
import zmq
from prometheus_client.parser import text_string_to_metric_families

from model_server.core.hashing import BlockHash, BlockHasher, PrefixScope, event_hash
from model_server.pods.lora_sync import AdapterServer, LoraSync
from model_server.server.kv_events import BlockStored, KvEventBatch, decode_batch
from model_server.server.kv_publisher import END_OF_REPLAY
from tests.vllm_env import server as vllm
from tests.vllm_env import tiny_model
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.prompts import prose

pytestmark = pytest.mark.vllm

SEED, TOPIC = 7, "pod"
ALPHA, BETA = tiny_model.ADAPTERS


@dataclass(frozen=True, slots=True)
class Started:
    server: vllm.VllmServer
    folder: Path
    """The folder of the sockets for KV events."""
    adapters: Path
    """The folder that holds each adapter under its name."""

    def served(self) -> dict[str, str]:
        """Return the path of each adapter."""
        cards = self.server.get("/v1/models").json()["data"]
        assert isinstance(cards, list)
        return {card["id"]: card["root"] for card in cards if card["parent"] is not None}


def arguments(folder: Path, adapters: Path) -> tuple[str, ...]:
    """Return what the chart writes for a profile with KV events, a hash seed and LoRA (tests/charts)."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": TOPIC,
    }
    return (
        *("--served-model-name", vllm.MODEL_NAME, "--max-model-len", "1024"),
        *("--block-size", str(vllm.BLOCK_TOKENS), "--enable-prefix-caching"),
        *("--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(events), "--enable-lora", "--max-loras", "2"),
        *("--max-lora-rank", str(tiny_model.LORA_RANK), "--lora-modules", f"{ALPHA}={adapters / ALPHA}"),
    )


@pytest.fixture(scope="module")
def started(vllm_environment: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("pod")
    adapters = vllm_environment.model_folder
    variables = {"PYTHONHASHSEED": str(SEED), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    # The launcher's own arguments come first, and vLLM takes the last one of two.
    options = vllm.ServerOptions(
        cache_blocks=256, adapters=(), arguments=arguments(folder, adapters), variables=variables
    )
    with vllm.VllmServer(vllm_environment, name="pod", folder=folder, options=options) as server:
        yield Started(server, folder, adapters)


def first_token(started: Started, prompt: str, *, model: str = vllm.MODEL_NAME) -> dict[str, object]:
    body: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = started.server.post("/v1/completions", body | {"return_token_ids": True})
    assert answer.status == 200, answer.body
    return answer.json()


def replayed(address: str) -> list[KvEventBatch]:
    batches: list[KvEventBatch] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 60_000
        dealer.connect(address)
        dealer.send_multipart([b"", bytes(8)])
        while True:
            _, topic, number, payload = dealer.recv_multipart()
            if number == END_OF_REPLAY:
                return batches
            assert topic == TOPIC.encode()
            batches.append(decode_batch(payload))


def test_blocks_in_its_kv_events_have_the_hashes_that_the_seed_fixes(started: Started) -> None:
    asked = [(model, prose(f"pod {model}", words=120)) for model in (vllm.MODEL_NAME, ALPHA)]
    hasher = BlockHasher("sha256_cbor", block_size_tokens=vllm.BLOCK_TOKENS, seed=str(SEED))
    expected: set[int] = set()
    for model, prompt in asked:
        choices = first_token(started, prompt, model=model)["choices"]
        assert isinstance(choices, list)
        tokens = choices[0]["prompt_token_ids"]
        scope = PrefixScope(ALPHA, str(started.adapters / ALPHA)) if model == ALPHA else PrefixScope()
        chain: list[BlockHash] = []
        hasher.extend(chain, tokens, num_blocks=len(tokens) // vllm.BLOCK_TOKENS, scope=scope)
        expected.update(map(event_hash, chain))
    assert len(expected) > 8
    first_token(started, prose("one more, whose step sends what is left", words=40))
    events = [e for batch in replayed(f"ipc://{started.folder}/replay") for e in batch.events]
    stored = {name for e in events if isinstance(e, BlockStored) for name in e.block_hashes}
    assert expected <= stored


def test_its_metrics_and_answers_say_what_the_picker_reads(started: Started) -> None:
    page = started.server.get("/metrics").body.decode()
    [info] = [
        sample.labels
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    ]
    assert info["block_size"] == str(vllm.BLOCK_TOKENS)
    assert info["prefix_caching_hash_algo"] == "sha256_cbor"
    assert info["enable_prefix_caching"] == "True"
    prompt = prose("asked twice", words=120)
    first_token(started, prompt)
    usage = first_token(started, prompt)["usage"]
    assert isinstance(usage, dict)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= vllm.BLOCK_TOKENS


async def test_lora_sync_follows_the_file_and_keeps_adapters_from_the_start(
    started: Started, tmp_path: Path
) -> None:
    file = tmp_path / "adapters.yaml"
    now = 0.0

    def want(*adapters: tuple[str, str]) -> None:
        file.write_text(yaml.safe_dump({"adapters": [{"name": n, "path": p} for n, p in adapters]}))

    def states() -> dict[str, str]:
        return {line["name"]: line["state"] for line in sync.status()["adapters"]}

    beta, missing = str(started.adapters / BETA), str(started.adapters / "no-such-adapter")
    async with aiohttp.ClientSession() as session:
        server = AdapterServer(f"http://{started.server.address}", session)
        sync = LoraSync(file=file, server=server, clock=lambda: now, rng=random.Random(1))
        want((BETA, beta), ("gamma", missing))
        await sync.sync()
        assert states() == {BETA: "loaded", "gamma": "failed", ALPHA: "foreign"}
        assert started.served() == {ALPHA: str(started.adapters / ALPHA), BETA: beta}
        assert first_token(started, "served by the new adapter", model=BETA)["model"] == BETA
        now = 1.0
        want((BETA, beta), ("gamma", beta))  # the files are there now, at another path
        await sync.sync()
        assert sync.in_sync
        want()
        await sync.sync()
        assert sync.in_sync
        assert started.served().keys() == {ALPHA}


def test_the_server_says_itself_where_to_subscribe(started: Started) -> None:
    source = started.server.get("/kv_event_sources").json()["0"]
    assert isinstance(source, dict)
    announced = (source["endpoint"], source["replay_endpoint"], source["topic"])
    assert announced == (f"ipc://{started.folder}/events", f"ipc://{started.folder}/replay", TOPIC)
    # Our own server reports a part of this.
    assert source.keys() >= {"enable_kv_cache_events", "publisher", "buffer_steps", "hwm"}
