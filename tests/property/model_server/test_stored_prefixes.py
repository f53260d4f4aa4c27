"""Prefixes come from a store below the cache, in any order of arrivals, loads, aborts and evictions.
Answers stay right.

The answers of this model depend on every slot that it reads (`paged_model`). So an answer changes if a
block was not filled or has another prefix's content.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from model_server.core.engine import Engine, EngineConfig, StepResult
from model_server.core.hashing import BlockHash
from model_server.core.request import NO_TOKEN, LoadedPrefix, OutsidePrefix, Request, RequestId, TokenId
from model_server.core.scheduler import Chunk, SchedulerLimits, StepPlan
from tests.unit.model_server.core.paged_model import PagedModel, answer_alone

BLOCK = 4
Slot = tuple[int, str]


class StoringModel(PagedModel):
    """Fills blocks from a store before it computes, and gives every full exact block of a prompt to the
    store.
    """

    def __init__(self) -> None:
        super().__init__(block_size_tokens=BLOCK)
        self.store: dict[BlockHash, list[Slot]] = {}
        self.loaded_blocks = 0
        self.outside_reads = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for load in plan.loads:
            assert isinstance(load.prefix.content, list)
            content = load.prefix.content[load.first_block - load.prefix.first_block :]
            assert len(content) == len(load.blocks)
            for block, slots in zip(load.blocks, content, strict=True):
                self.loaded_blocks += 1
                for slot, value in enumerate(slots):
                    self._slots[block.block_id, slot] = value
        result = super().execute(plan)
        for chunk in plan.chunks:
            if chunk.samples and not chunk.request.approximation:
                for index in range((chunk.start + chunk.num_tokens) // BLOCK):
                    key = chunk.table[index].block_id
                    slots = [self._slots[key, slot] for slot in range(BLOCK)]
                    known = self.store.setdefault(chunk.request.block_hashes[index], slots)
                    assert known == slots, "two contents under one hash"
        return result

    def _read(self, chunk: Chunk) -> str:
        stored = chunk.request.stored
        if isinstance(stored, OutsidePrefix):
            assert isinstance(stored.view, list)
            assert chunk.start >= stored.num_blocks * BLOCK
            self.outside_reads += 1
            for index, slots in enumerate(stored.view):
                for slot, value in enumerate(slots):
                    # The content of the request's own block belongs to nobody. It is there for this read
                    # alone.
                    self._slots[chunk.table[index].block_id, slot] = value
        read = super()._read(chunk)
        if isinstance(stored, OutsidePrefix):
            for index in range(stored.num_blocks):
                for slot in range(BLOCK):
                    self._slots[chunk.table[index].block_id, slot] = (-1, "nothing")
        return read


@dataclass
class LoadingArrival:
    prefix: int
    length: int
    answer: int
    pause_steps: int
    load_steps: int
    outside: bool
    aborted_after: int | None
    at_most: int
    """Blocks of the prefix that the store still has."""


arrivals = st.lists(
    st.builds(
        LoadingArrival,
        prefix=st.integers(0, 2),
        length=st.integers(5, 26),
        answer=st.integers(1, 8),
        pause_steps=st.integers(0, 4),
        load_steps=st.integers(0, 6),
        outside=st.booleans(),
        aborted_after=st.sampled_from([None, None, None, 0, 1, 3]),
        at_most=st.integers(1, 6),
    ),
    min_size=1,
    max_size=14,
)


@dataclass
class EngineWithStore:
    engine: Engine
    model: StoringModel
    loading: dict[Request, tuple[int, LoadedPrefix | OutsidePrefix]] = field(default_factory=dict)
    to_abort: dict[Request, int] = field(default_factory=dict)

    def arrive(self, number: int, arrival: LoadingArrival) -> Request:
        tokens = [TokenId(100 * arrival.prefix + at // 3) for at in range(arrival.length)]
        request = Request(RequestId(str(number)), tokens, max_tokens=arrival.answer, arrival_s=0.0)
        self.engine.add(request)
        cached = self.engine.kv_cache.get_computed(request)
        usable = (len(tokens) - 1) // BLOCK
        held: list[list[Slot]] = []
        for block in request.block_hashes[:usable]:
            if block not in self.model.store or len(held) == arrival.at_most:
                break
            held.append(self.model.store[block])
        first = len(cached.blocks)
        if len(held) > first:
            request.loading = True
            stored: LoadedPrefix | OutsidePrefix = LoadedPrefix(first, len(held), 1, held[first:])
            if arrival.outside:
                stored = OutsidePrefix(len(held), held)
            self.loading[request] = arrival.load_steps, stored
        if arrival.aborted_after is not None:
            self.to_abort[request] = arrival.aborted_after
        return request

    def step(self) -> None:
        for request, (steps, stored) in list(self.loading.items()):
            self.loading[request] = steps - 1, stored
            if not steps:
                del self.loading[request]
                request.loading = False
                if request.finish_reason is None:
                    request.stored = stored
                    if isinstance(stored, OutsidePrefix):
                        request.approximate("sel:0.5")
        if self.engine.can_step:
            self.engine.step(now=0.0)
        self.engine.check_integrity()
        for request, steps in list(self.to_abort.items()):
            self.to_abort[request] = steps - 1
            if not steps:
                del self.to_abort[request]
                self.engine.abort(request.request_id)
                self.engine.check_integrity()


def run(
    coming: Sequence[LoadingArrival], *, num_blocks: int, seqs: int, budget: int
) -> tuple[StoringModel, list[Request]]:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=BLOCK,
        eos_token_id=NO_TOKEN,
        limits=SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=budget),
    )
    model = StoringModel()
    running = EngineWithStore(Engine(config, model), model)
    requests = []
    for number, arrival in enumerate(coming):
        for _ in range(arrival.pause_steps):
            running.step()
        requests.append(running.arrive(number, arrival))
    for _ in range(2000):
        if not running.engine.num_unfinished:
            break
        running.step()
    assert not running.engine.num_unfinished
    for request in requests:
        answer = request.token_ids[request.num_prompt_tokens :]
        assert answer == answer_alone(request)[: len(answer)]
        assert (request.num_cached_tokens or 0) >= request.num_stored_tokens >= 0
    stats = running.engine.kv_cache.stats
    assert stats.external_hits_tokens == sum(request.num_stored_tokens for request in requests)
    assert stats.external_hits_tokens <= stats.external_queries_tokens
    return model, requests


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(arrivals, st.integers(9, 16), st.integers(1, 5), st.integers(4, 40))
def test_answers_equal_those_of_a_model_that_computes_everything(
    coming: list[LoadingArrival], num_blocks: int, seqs: int, budget: int
) -> None:
    run(coming, num_blocks=num_blocks, seqs=seqs, budget=budget)


def arrival_alone(prefix: int, *, outside: bool, at_most: int) -> LoadingArrival:
    """Return the answer of a request that comes long after the one before it."""
    return LoadingArrival(prefix, 25, 3, 30, 2, outside, None, at_most)


def test_prefixes_are_loaded_or_read_outside_the_blocks() -> None:
    coming = [arrival_alone(number % 3, outside=number % 2 == 0, at_most=6) for number in range(12)]
    model, _ = run(coming, num_blocks=10, seqs=2, budget=8)
    assert model.loaded_blocks > 10
    assert model.outside_reads > 10


def test_blocks_after_an_outside_prefix_are_found_by_the_same_kind() -> None:
    """The blocks are in their places, after blocks that stay empty."""
    coming = [arrival_alone(prefix, outside=False, at_most=6) for prefix in (0, 1, 2)]
    coming += [arrival_alone(0, outside=True, at_most=2), arrival_alone(0, outside=True, at_most=2)]
    _, requests = run(coming, num_blocks=10, seqs=2, budget=8)
    found = [(request.num_cached_tokens, request.num_stored_tokens) for request in requests[3:]]
    assert found == [(8, 8), (24, 8)]
