"""The engine's runner over a real model. It takes a plan, and returns the sampled tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from model_server.core.engine import StepResult
from model_server.core.request import TokenId
from model_server.core.sampling import TokenLogprobs
from model_server.core.scheduler import StepPlan
from model_server.runners.hf.model import PagedModel
from model_server.runners.hf.sampler import choose


class HfRunner:
    """Computes in the caller's thread, and adds no modelled time."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def execute(self, plan: StepPlan) -> StepResult:
        logits = self._logits(plan)
        sampling = [index for index, chunk in enumerate(plan.chunks) if chunk.samples]
        tokens: list[TokenId | None] = [None] * len(plan.chunks)
        wanted_logprobs: list[TokenLogprobs | None] = [None] * len(plan.chunks)
        if sampling:
            rows = torch.stack([logits[index] for index in sampling])
            chosen, logprobs = choose(rows, [plan.chunks[index].request for index in sampling])
            for index, token, of_token in zip(sampling, chosen, logprobs, strict=True):
                tokens[index], wanted_logprobs[index] = token, of_token
        # Each row is copied, because the row itself would keep the step's whole batch in memory.
        last_logits = [
            row.clone() if chunk.keeps_logits else None
            for chunk, row in zip(plan.chunks, logits, strict=True)
        ]
        return StepResult(tokens, 0.0, wanted_logprobs, last_logits)

    def _logits(self, plan: StepPlan) -> Sequence[torch.Tensor]:
        """Return the logits after each chunk. They are computed now, or kept from an equal prompt."""
        computed = iter(
            self.model.forward(replace(plan, chunks=tuple(c for c in plan.chunks if c.kept is None)))
        )
        return [
            next(computed) if c.kept is None else cast("torch.Tensor", c.kept.last_logits)
            for c in plan.chunks
        ]
