"""Our KV cache against vLLM's own KVCacheManager on 250 random traces: hits, blocks, refusals, order of
eviction.
"""

from __future__ import annotations

import pytest

from model_server.core.cache_options import CacheOptions
from model_server.core.hashing import BlockHasher
from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Adapter, Request, RequestId, TokenId
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
def test_001_2_hits_blocks_and_eviction_order_equal_those_of_vllm(
    traces: list[Trace],
) -> None:
    assert len(traces) == 250
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
    assert sum(outcome.hit_tokens > 0 for outcome in outcomes) > 500
    assert sum(outcome.new_blocks is None for outcome in outcomes) > 500
