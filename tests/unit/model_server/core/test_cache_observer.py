"""An observer of the cache hears of exactly the blocks that the cache holds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from model_server.core.engine import Engine, EngineConfig, StepResult
from model_server.core.hashing import BlockHash
from model_server.core.request import Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits, StepPlan
from tests.harness.engine_requests import request_of

SIZE = 4


class ConstantRunner:
    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([TokenId(7) if chunk.samples else None for chunk in plan.chunks], 1.0)


class Mirror:
    """The copies of each hash, known only from what the observer hears."""

    def __init__(self) -> None:
        self.copies: Counter[BlockHash] = Counter()
        self.spans: list[tuple[int, int]] = []

    def stored(self, request: Request, *, first: int, end: int) -> None:
        assert 0 <= first < end <= len(request.block_hashes)
        assert end * SIZE <= len(request.token_ids)
        self.spans.append((first, end))
        self.copies.update(request.block_hashes[first:end])

    def removed(self, block_hash: BlockHash) -> None:
        self.copies[block_hash] -= 1
        assert self.copies[block_hash] >= 0

    def cleared(self) -> None:
        self.copies.clear()


def constant_engine(num_blocks: int) -> Engine:
    limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=16)
    config = EngineConfig(
        num_blocks=num_blocks, block_size_tokens=SIZE, eos_token_id=TokenId(0), limits=limits
    )
    return Engine(config, ConstantRunner())


def cached_hashes(engine: Engine) -> Counter[BlockHash]:
    return Counter(b.block_hash for b in engine.kv_cache.pool.blocks if b.block_hash is not None)


def test_a_block_of_prompt_or_answer_is_reported_when_it_is_full() -> None:
    engine, mirror = constant_engine(20), Mirror()
    engine.kv_cache.observer = mirror
    engine.add(request_of(9, name="a", max_tokens=5))
    now = 0.0
    while engine.num_unfinished:
        _, now = engine.step(now=now)
    assert mirror.spans == [(0, 2), (2, 3)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_after_any_events_the_mirror_holds_each_hash_as_often_as_the_cache(
    actions: list[tuple[str, int, int]],
) -> None:
    engine, mirror = constant_engine(12), Mirror()
    engine.kv_cache.observer = mirror
    added, now = 0, 0.0
    for action, first, second in actions:
        match action:
            case "add":
                engine.add(request_of(first, name=str(added), max_tokens=second))
                added += 1
            case "step" if engine.num_unfinished:
                _, now = engine.step(now=now)
            case "abort":
                engine.abort(RequestId(str(first)))
            case "reset":
                engine.kv_cache.reset_prefix_cache()
        assert +mirror.copies == cached_hashes(engine)
