"""The continuous engine under every cache option, with aborts, stops and resets while steps are computed.

The answers of this model depend on every slot that it reads (`paged_model`). So an answer changes if a
block was given away too early, a copy was not made, or a kept prompt was overwritten.
"""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
from model_server.core.eviction import EVICTION_NAMES
from model_server.core.request import NO_TOKEN, Adapter, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from tests.unit.model_server.core.paged_model import PagedModel, answer_alone

BLOCK = 4

options = st.builds(
    CacheOptions,
    hash_algorithm=st.just("sha256"),
    eviction=st.sampled_from(EVICTION_NAMES),
    max_unused_blocks=st.sampled_from([None, 0, 2]),
    preallocated_blocks=st.integers(0, 2),
    partial_blocks=st.booleans(),
)
configs = st.builds(
    EngineConfig,
    num_blocks=st.integers(5, 14),
    block_size_tokens=st.just(BLOCK),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    eos_token_id=st.just(NO_TOKEN),
    prompt_cache_entries=st.sampled_from([0, 0, 1, 3]),
    cache=options,
    limits=st.builds(
        SchedulerLimits,
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 12),
        max_loras=st.integers(1, 2),
    ),
)
actions = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 14), st.sampled_from([None, "a", "b", "c"])),
    st.tuples(st.just("go on"), st.integers(0, 9), st.integers(0, 2), st.sampled_from([None, "a"])),
    st.tuples(st.sampled_from(["step", "step", "step", "abort", "stop", "reset"]), st.integers(0, 9)),
)
"""Events between two steps come while the first step is computed, or after it."""


class MeddledEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.model = PagedModel(block_size_tokens=BLOCK)
        self.engine = Engine(config, self.model)
        self.requests: list[Request] = []

    def ask(self, tokens: list[int], adapter: str | None) -> None:
        request = Request(
            request_id=RequestId(str(len(self.requests))),
            token_ids=[TokenId(token) for token in tokens],
            max_tokens=1 + len(tokens) % 7,
            arrival_s=0.0,
            adapter=Adapter(adapter) if adapter else None,
        )
        if request.num_prompt_tokens < self.engine.config.max_len_tokens:
            self.engine.add(request)
            self.requests.append(request)

    def meddle(self, action: tuple[object, ...]) -> None:
        match action:
            case ("ask", int(prefix), int(length), adapter):
                assert adapter is None or isinstance(adapter, str)
                self.ask([50 * prefix + place for place in range(length)], adapter)
            case ("go on", int(which), int(more), adapter) if self.requests:
                assert adapter is None or isinstance(adapter, str)
                before = self.requests[which % len(self.requests)]
                self.ask([*before.token_ids, *range(more)], adapter)
            case ("abort", int(which)) if self.requests:
                self.engine.abort(self.requests[which % len(self.requests)].request_id)
            case ("stop", int(which)) if running := [
                r for r in self.engine.scheduler.running if r.num_output_tokens
            ]:
                self.engine.stop(running[which % len(running)].request_id)
            case ("reset", int()):
                self.engine.reset_prefix_cache()
        self.engine.check_integrity()

    def step(self, meanwhile: list[tuple[object, ...]]) -> None:
        """Do one step. The first half of the events between two steps comes before anything is computed."""
        plan = self.engine.begin(now=0.0) if self.engine.can_step else None
        self.engine.check_integrity()
        half = len(meanwhile) // 2
        for action in meanwhile[:half]:
            self.meddle(action)
        result = self.model.execute(plan) if plan else None
        for action in meanwhile[half:]:
            self.meddle(action)
        if plan and result:
            budget = self.engine.config.limits.max_num_batched_tokens
            assert sum(chunk.num_tokens for chunk in plan.chunks) <= budget
            self.engine.finish(plan, result, now=0.0)
        self.engine.check_integrity()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(config=configs, script=st.lists(actions, max_size=60))
def test_whatever_happens_in_a_step_answers_are_right_and_blocks_freed(
    config: EngineConfig, script: list[tuple[object, ...]]
) -> None:
    session = MeddledEngine(config)
    for is_step, group in itertools.groupby(script, key=lambda action: action[0] == "step"):
        if is_step:
            for _ in group:
                session.step([])
        else:
            session.step(list(group))
    for _ in range(3000):
        if not session.engine.num_unfinished:
            break
        session.step([])
    assert session.engine.num_unfinished == 0
    for request in session.requests:
        answer = request.token_ids[request.num_prompt_tokens :]
        assert answer == answer_alone(request)[: len(answer)]
    if session.engine.prompt_cache is not None:
        session.engine.prompt_cache.clear()
    assert session.engine.kv_cache.pool.num_free == config.num_blocks
