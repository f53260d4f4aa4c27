"""Drives vLLM's own KVCacheManager through random traces and writes what it did to
`data/kv_cache_traces.json.bz2`.

Run from the repository root with the Python of the vLLM environment (its `environment.locate().python`).
This takes a minute:

    env -u PYTHONHASHSEED PYTHON_OF_VLLM -m tests.contract.record_kv_cache_traces

Recorded with vLLM 0.32 on the CPU. vLLM keeps block 0 for itself, so its blocks are numbered from 1 and one
more is ordered; the file numbers them from 0. vLLM is imported by name, since nothing of it is installed
where types are checked.
"""

import random
import sys
from importlib import import_module
from typing import Any

from tests.contract.kv_cache_traces import (
    SCOPES,
    Admit,
    Free,
    Go,
    Outcome,
    Trace,
    next_step,
    order_digest,
    sampled_token,
    write,
)

NUM_TRACES = 100
STEPS = 40


class VllmSide:
    """One cache of vLLM with its live requests."""

    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        torch = import_module("torch")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        specs = import_module("vllm.v1.kv_cache_interface")
        sha256 = import_module("vllm.utils.hashing").sha256
        manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        utils.init_none_hash(sha256)
        spec = specs.FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.manager: Any = manager(
            specs.KVCacheConfig(
                num_blocks=num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[specs.KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=100_000,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
        )
        self.hasher: Any = utils.get_request_block_hasher(block_tokens, sha256)
        self.requests: dict[int, Any] = {}

    def admit(self, number: int, step: Admit) -> tuple[Outcome, str]:
        lora_request = import_module("vllm.lora.request").LoRARequest
        sampling_params = import_module("vllm.sampling_params").SamplingParams
        vllm_request = import_module("vllm.v1.request").Request

        name, path, salt = SCOPES[step.prompt.scope]
        request: Any = vllm_request(
            request_id=str(number),
            prompt_token_ids=step.prompt.tokens(),
            sampling_params=sampling_params(max_tokens=10_000),
            pooling_params=None,
            lora_request=lora_request(name, step.prompt.scope, path) if name else None,
            cache_salt=salt or None,
            block_hasher=self.hasher,
        )
        blocks, hit_tokens, _ = self.manager.get_computed_blocks(request)
        new_tokens = min(request.num_tokens - hit_tokens, step.budget_tokens)
        new = self.manager.allocate_slots(request, new_tokens, hit_tokens, blocks)
        last_hash = request.block_hashes[-1].hex()[:8] if request.block_hashes else ""
        if new is not None:
            request.num_computed_tokens = hit_tokens + new_tokens
            self.requests[number] = request
        return Outcome(hit_tokens, self._ids(new), self._free_order()), last_hash

    def go(self, step: Go) -> Outcome:
        request = self.requests[step.request]
        waiting = request.num_tokens - request.num_computed_tokens
        if not waiting:
            request.append_output_token_ids(sampled_token(step.request, request.num_tokens))
            waiting = 1
        new_tokens = min(waiting, step.budget_tokens)
        new = self.manager.allocate_slots(request, new_tokens)
        if new is not None:
            request.num_computed_tokens += new_tokens
        return Outcome(-1, self._ids(new), self._free_order())

    def free(self, step: Free) -> Outcome:
        self.manager.free(self.requests.pop(step.request))
        return Outcome(-1, [], self._free_order())

    def _ids(self, blocks: Any) -> list[int] | None:
        return None if blocks is None else [block.block_id - 1 for block in blocks.blocks[0]]

    def _free_order(self) -> int:
        queue = self.manager.block_pool.free_block_queue
        return order_digest(block.block_id - 1 for block in queue.get_all_free_blocks())


def record(seed: int) -> Trace:
    rng = random.Random(seed)
    num_blocks, block_tokens = rng.randrange(6, 24), rng.choice((2, 4, 16))
    side = VllmSide(num_blocks=num_blocks, block_tokens=block_tokens)
    trace = Trace(num_blocks, block_tokens, [], [], [])
    for _ in range(STEPS):
        admissions = len(trace.last_hashes)
        step = next_step(rng, block_tokens=block_tokens, live=sorted(side.requests), admissions=admissions)
        if isinstance(step, Admit):
            outcome, last_hash = side.admit(admissions, step)
            trace.last_hashes.append(last_hash)
        else:
            outcome = side.go(step) if isinstance(step, Go) else side.free(step)
        trace.steps.append(step)
        trace.outcomes.append(outcome)
    return trace


def main() -> int:
    traces = [record(seed) for seed in range(NUM_TRACES)]
    write(traces)
    outcomes = [outcome for trace in traces for outcome in trace.outcomes]
    print(
        f"{len(traces)} traces, {len(outcomes)} steps, {sum(o.hit_tokens > 0 for o in outcomes)} hits, "
        f"{sum(o.new_blocks is None for o in outcomes)} refused"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
