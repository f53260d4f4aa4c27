"""The engine's runner over a real model: a plan in, sampled tokens out, when they are computed."""

from __future__ import annotations

import torch

from model_server.core.engine import StepResult
from model_server.core.request import TokenId
from model_server.core.sampling import TokenLogprobs
from model_server.core.scheduler import StepPlan
from model_server.runners.hf.model import PagedModel
from model_server.runners.hf.sampler import choose


class HfRunner:
    """Computes in the caller's thread, and takes no modelled time beyond that."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def execute(self, plan: StepPlan) -> StepResult:
        logits = self.model.forward(plan)
        sampling = [index for index, chunk in enumerate(plan.chunks) if chunk.samples]
        tokens: list[TokenId | None] = [None] * len(plan.chunks)
        told: list[TokenLogprobs | None] = [None] * len(plan.chunks)
        if sampling:
            rows = torch.stack([logits[index] for index in sampling])
            chosen, logprobs = choose(rows, [plan.chunks[index].request for index in sampling])
            for index, token, tell in zip(sampling, chosen, logprobs, strict=True):
                tokens[index], told[index] = token, tell
        return StepResult(tokens, 0.0, told)
