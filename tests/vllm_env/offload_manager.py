"""Drives vLLM's own offload manager as its scheduler does, without an engine. It runs in the vLLM environment
and writes JSON.

`python -m tests.vllm_env.offload_manager` answers every question below at once, since importing vLLM takes
longest. The tests read the answers. This module asserts the invariants at each step of a history.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

MODULE = "model_server.pods.vllm.offload_policy"
OURS = "UsesCachePolicy"
POLICIES = ("lru", "arc", OURS)
CHUNK_TOKENS = 32

Prompt = Sequence[str]
"""A prompt is the names of its chunks, head first. As with block hashes, a name implies all
chunks before it.
"""


def manager_with(policy: str, *, num_chunks: int) -> CPUOffloadingManager:
    return CPUOffloadingManager(num_chunks, cache_policy=policy, cache_policy_module_path=MODULE)


def eviction_policy_of(manager: CPUOffloadingManager) -> Any:
    return manager._policy  # noqa: SLF001 - vLLM has no public name for it


def keys_of(prompt: Prompt) -> list[OffloadKey]:
    return [make_offload_key(name.encode(), 0) for name in prompt]


def context_of(prompt: Prompt) -> ReqContext:
    context = ReqContext("request")
    for number, key in enumerate(keys_of(prompt), 1):
        context.set_offload_key_position(key, number * CHUNK_TOKENS)
    return context


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    found: int
    """Chunks of the prompt that were read from the tier, from its head on."""
    evicted: list[str]


def serve(manager: CPUOffloadingManager, prompt: Prompt) -> ServedPrompt:
    keys, context = keys_of(prompt), context_of(prompt)
    manager.on_new_request(context)
    found = 0
    while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
        found += 1
    evicted: list[str] = []
    if found:
        manager.prepare_load(keys[:found], context)
        manager.complete_load(keys[:found], context)
    if found < len(keys) and (store := manager.prepare_store(keys[found:], context)) is not None:
        evicted = [key[:-4].decode() for key in store.evicted_keys]
        manager.complete_store(store.keys_to_store, context)
    manager.on_request_finished(context)
    return ServedPrompt(found, evicted)


def order_of_eviction() -> list[str]:
    """Return the order of eviction. It follows the uses and not the last use."""
    manager = manager_with(OURS, num_chunks=4)
    for prompt, uses in ((["x"], 3), (["w0", "w1"], 2), (["y"], 1)):
        for _ in range(uses):
            serve(manager, prompt)
    return serve(manager, [f"new{n}" for n in range(3)]).evicted


def what_is_in_flight() -> dict[str, object]:
    """Read the first of three chunks, and ask for another one of them again. The tier then has no room for
    two chunks, and nothing changes.
    """
    manager = manager_with(OURS, num_chunks=3)
    for name in ("read", "again", "idle"):
        serve(manager, [name])
    reading = context_of(["read"])
    manager.prepare_load(keys_of(["read"]), reading)
    asked = ["again", "new1", "new2"]
    refused = manager.prepare_store(keys_of(asked), context_of(asked)) is None
    kept = [
        name
        for name in ("read", "again", "idle")
        if manager.lookup(keys_of([name])[0], reading) is LookupResult.HIT
    ]
    one = manager.prepare_store(keys_of(["again", "new1"]), context_of(["again", "new1"]))
    assert one is not None
    unwritten = manager.lookup(keys_of(["new1"])[0], reading).name
    none_idle = manager.prepare_store(keys_of(["again", "new2"]), context_of(["again", "new2"])) is None
    manager.complete_load(keys_of(["read"]), reading)
    manager.on_request_finished(reading)
    after = manager.prepare_store(keys_of(["new2"]), context_of(["new2"]))
    return {
        "refused": refused,
        "kept": kept,
        "evicted": [key[:-4].decode() for key in one.evicted_keys],
        "unwritten": unwritten,
        "none idle": none_idle,
        "then evicted": [key[:-4].decode() for key in after.evicted_keys] if after else [],
    }


def uses_after_a_reset() -> int:
    """Return the uses of a chunk that a request used, the tier forgot, and the same request uses again."""
    manager, [key], context = manager_with(OURS, num_chunks=2), keys_of(["a"]), context_of(["a"])
    for _ in range(2):
        manager.prepare_store([key], context)
        manager.complete_store([key], context)
        uses: int = eviction_policy_of(manager).ranking.num_uses(key)
        manager.reset_cache()
    return uses


def zipf(*, seed: int, prefixes: int, requests: int, drift: bool) -> Iterator[tuple[int, int]]:
    """Return prefix and question of each request.
    `drift`: a tenth of the ranks change places every fiftieth request.
    """
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(prefixes)]
    names = list(range(prefixes))
    for number in range(requests):
        if drift and number % 50 == 49:
            for _ in range(prefixes // 10):
                one, other = rng.randrange(prefixes), rng.randrange(prefixes)
                names[one], names[other] = names[other], names[one]
        [rank] = rng.choices(range(prefixes), weights)
        yield names[rank], number


def trace(policy: str, *, drift: bool) -> dict[str, float]:
    """Return the share of chunks found, and the time per chunk, in a tier that holds a tenth of the prefixes.
    Each prompt has a shared prefix of 8 to 32 chunks and 2 chunks of its own.
    """
    rng = random.Random(5)
    prefixes = 120
    lengths = [rng.randrange(8, 33) for _ in range(prefixes)]
    manager = manager_with(policy, num_chunks=sum(lengths) // 10)
    found = asked = 0
    started = time.process_time()
    for prefix, question in zipf(seed=11, prefixes=prefixes, requests=3000, drift=drift):
        prompt = [f"{prefix}.{n}" for n in range(lengths[prefix])] + [f"q{question}.{n}" for n in range(2)]
        found += serve(manager, prompt).found
        asked += len(prompt)
    return {"hit rate": found / asked, "us a chunk": (time.process_time() - started) / asked * 1e6}


def main() -> None:
    questions: dict[str, Callable[[], object]] = {
        "order": order_of_eviction,
        "in flight": what_is_in_flight,
        "after a reset": uses_after_a_reset,
    }
    for name, drift in (("steady", False), ("drifting", True)):
        questions[name] = partial(
            lambda drift: {policy: trace(policy, drift=drift) for policy in POLICIES}, drift
        )
    json.dump({name: answer() for name, answer in questions.items()}, sys.stdout)


if __name__ == "__main__":
    main()
