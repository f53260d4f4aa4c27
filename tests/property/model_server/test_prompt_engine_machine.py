"""Row 003-2: requests are added, stepped, taken out and evicted in any order. Answers are right and no
block is lost.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import EngineConfig
from model_server.core.prompt_engine import OnlineScheduler, OutOfBlocksError, PromptEngine
from model_server.core.request import FinishReason, Request, RequestId, TokenId
from tests.unit.model_server.core.paged_model import PagedModel, answer_alone, greedy

BLOCK = 4
NUM_BLOCKS = 14


class PromptEngineMachine(RuleBasedStateMachine):
    @initialize(
        entries=st.integers(0, 4), caching=st.booleans(), partial=st.booleans(), batch=st.integers(1, 3)
    )
    def begin(self, *, entries: int, caching: bool, partial: bool, batch: int) -> None:
        config = EngineConfig(
            num_blocks=NUM_BLOCKS,
            block_size_tokens=BLOCK,
            enable_prefix_caching=caching,
            eos_token_id=TokenId(-1),
            cache=CacheOptions(partial_blocks=partial, hash_algorithm="xxh3"),
        )
        model = PagedModel(block_size_tokens=BLOCK)
        self.engine = PromptEngine(config, model, sample=greedy, prompt_cache_entries=entries)
        self.online = OnlineScheduler(self.engine, max_batch_size=batch)
        self.under_way: list[Request] = []
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=11), most=st.integers(1, 9))
    def add(self, tokens: list[int], most: int) -> None:
        self.count += 1
        request = Request(
            request_id=RequestId(str(self.count)),
            token_ids=[TokenId(token) for token in tokens],
            max_tokens=most,
            arrival_s=0.0,
        )
        unfinished = [one for one in self.under_way if one.finish_reason is None]
        wanted = [one.num_prompt_tokens + one.max_tokens for one in (*unfinished, request)]
        fits = sum(-(-tokens // BLOCK) for tokens in wanted) <= NUM_BLOCKS
        try:
            self.online.add(request)
        except OutOfBlocksError:
            assert not fits
        else:
            assert fits
            self.under_way.append(request)

    @rule()
    def step(self) -> None:
        self.online.step()

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        request = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        assert self.online.pop(request.request_id) is request
        assert request.finish_reason in {FinishReason.LENGTH, FinishReason.ABORT}

    @rule()
    def evict(self) -> None:
        self.engine.prompt_cache.evict_one()

    @invariant()
    def test_003_2_no_block_is_lost_and_every_answer_is_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for request in self.under_way:
            answer = request.token_ids[request.num_prompt_tokens :]
            assert answer == answer_alone(request)[: len(answer)]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request in self.under_way:
            self.online.pop(request.request_id)
        self.engine.prompt_cache.clear()
        self.engine.check_integrity()
        assert self.engine.kv_cache.pool.num_free == NUM_BLOCKS


PromptEngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
Test_003_2_prompt_engine = pytest.mark.slow(PromptEngineMachine.TestCase)
