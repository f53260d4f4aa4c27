"""An engine around a model that keeps its logits, and the plain model to compare the logits with."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig, StepResult
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits, StepPlan
from model_server.runners.hf.model import PagedModel
from model_server.runners.hf.runner import HfRunner
from tests.engine.tiny_models import VOCABULARY

BLOCK_TOKENS = 8


class Recorded(HfRunner):
    """Keeps the logits of every sampled token."""

    def __init__(self, model: PagedModel) -> None:
        super().__init__(model)
        self.steps: list[StepPlan] = []
        self.logits: dict[tuple[RequestId, int], torch.Tensor] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        self.steps.append(plan)
        for chunk, logits in zip(plan.chunks, self.model.forward(StepPlan(plan.chunks)), strict=True):
            if chunk.samples:
                self.logits[chunk.request.request_id, chunk.start + chunk.num_tokens] = logits
        return result


def engine_around(
    module: Any, *, num_blocks: int = 64, budget: int = 2048, partial_blocks: bool = False
) -> tuple[Engine, Recorded]:
    model = PagedModel(module, num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS)
    runner = Recorded(model)
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=BLOCK_TOKENS,
        eos_token_id=NO_TOKEN,
        cache=CacheOptions(partial_blocks=partial_blocks),
        limits=SchedulerLimits(max_num_batched_tokens=budget),
    )
    return Engine(config, runner), runner


def named_request(
    name: str,
    tokens: Sequence[int],
    *,
    max_tokens: int = 6,
    salt: str = "",
) -> Request:
    return Request(
        RequestId(name),
        [TokenId(t) for t in tokens],
        max_tokens=max_tokens,
        arrival_s=0.0,
        cache_salt=salt,
    )


def tokens(count: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def plain_logits(module: Any, sequence: Sequence[int]) -> torch.Tensor:
    """Return logits of shape (positions, vocabulary). The unchanged model computes the whole sequence at
    once.
    """
    with torch.inference_mode():
        logits: torch.Tensor = module(input_ids=torch.tensor([list(sequence)])).logits[0]
    return logits


def check_against_plain(
    runner: Recorded, plain: Any, requests: Sequence[Request], *, atol: float = 1e-4
) -> None:
    """Compare the logits of every sampled token, and check that the likeliest token was taken."""
    for request in requests:
        expected = plain_logits(plain, request.token_ids)
        for end in range(request.num_prompt_tokens, len(request.token_ids)):
            torch.testing.assert_close(
                runner.logits[request.request_id, end], expected[end - 1], rtol=1e-4, atol=atol
            )
            assert request.token_ids[end] == int(expected[end - 1].argmax())
