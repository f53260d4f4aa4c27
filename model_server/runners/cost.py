"""A runner that computes nothing, and whose steps take as long as a real model's. Gateways, tests and
simulations use it.

A step takes this many seconds at speed 1; p are the prefill chunks and d the requests that decode:

    prefill = sum over p of  n / prefill_rate * (1 + (start + n / 2) / context_knee)
    decode  = step + per_request * (len(d) - 1) + per_context_token * (context of all d)
    total   = decode + prefill * (1 + interference)     with both prefill and decode
            = max(step, prefill)                        with prefill alone
            = decode                                    with decode alone

So a chunk of prefill takes longer the later it stands in its prompt (attention grows with the context), and
decoding requests wait for the prompts that are computed in their step. An adapter that is not resident costs
its loading time in the first step that uses it. The adapters used last stay resident.

The caller waits for these durations. No clock is read here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from model_server.core.engine import StepResult
from model_server.core.request import Adapter, Request, TokenId
from model_server.core.scheduler import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The defaults are those of an 8B model on one data-centre GPU."""

    prefill_tokens_per_s: float = 8000.0
    context_knee_tokens: float = 32768.0
    """At this context a token's prefill costs twice as much as at the start."""
    decode_step_s: float = 0.020
    decode_per_request_s: float = 0.0002
    decode_per_context_token_s: float = 2e-8
    interference: float = 0.1
    """The share by which prefill takes longer in a step that also decodes."""
    lora_load_s: float = 0.050
    speed: float = 1.0
    """All durations are divided by this number."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "context_knee_tokens", "speed"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive")
        for name in (
            "decode_step_s",
            "decode_per_request_s",
            "decode_per_context_token_s",
            "interference",
            "lora_load_s",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative")

    def prefill_s(self, *, start: int, num_tokens: int) -> float:
        middle = start + num_tokens / 2
        return num_tokens / self.prefill_tokens_per_s * (1 + middle / self.context_knee_tokens)

    def step_s(self, plan: StepPlan) -> float:
        """Return the time of the whole step without adapter loads, at speed 1."""
        prefill, context, decoding = 0.0, 0, 0
        for chunk in plan.chunks:
            if chunk.num_tokens == 1:
                decoding += 1
                context += chunk.start
            else:
                prefill += self.prefill_s(start=chunk.start, num_tokens=chunk.num_tokens)
        if not decoding:
            return max(self.decode_step_s, prefill)
        decode = (
            self.decode_step_s
            + self.decode_per_request_s * (decoding - 1)
            + self.decode_per_context_token_s * context
        )
        return decode + prefill * (1 + self.interference)


class CostRunner:
    """Remembers only which adapters are resident."""

    def __init__(self, model: CostModel, *, max_loras: int, next_token: Callable[[Request], TokenId]) -> None:
        self._model = model
        self._max_loras = max_loras
        self._next_token = next_token
        self._resident: OrderedDict[Adapter, None] = OrderedDict()

    def execute(self, plan: StepPlan) -> StepResult:
        load_s = self._load_adapters(plan)
        tokens = [self._next_token(chunk.request) if chunk.samples else None for chunk in plan.chunks]
        return StepResult(tokens, (self._model.step_s(plan) + load_s) / self._model.speed)

    def _load_adapters(self, plan: StepPlan) -> float:
        loaded = 0
        for chunk in plan.chunks:
            adapter = chunk.request.adapter
            if adapter is None:
                continue
            loaded += adapter not in self._resident
            self._resident[adapter] = None
            self._resident.move_to_end(adapter)
        while len(self._resident) > self._max_loras:
            self._resident.popitem(last=False)
        return loaded * self._model.lora_load_s
