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

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from model_server.core.engine import StepResult
from model_server.core.request import Request, TokenId
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

    def step_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return the time of the whole step without adapter loads, at speed 1. `chunks`: the start and the
        number of tokens of each.
        """
        prefill, context, decoding = 0.0, 0, 0
        for start, num_tokens in chunks:
            if num_tokens == 1:
                decoding += 1
                context += start
            else:
                prefill += self.prefill_s(start=start, num_tokens=num_tokens)
        if not decoding:
            return max(self.decode_step_s, prefill)
        decode = (
            self.decode_step_s
            + self.decode_per_request_s * (decoding - 1)
            + self.decode_per_context_token_s * context
        )
        return decode + prefill * (1 + self.interference)


class ResidentAdapters(OrderedDict[Hashable, None]):
    """The adapters used last, at most `most`."""

    def use(self, adapters: Iterable[Hashable], *, most: int) -> int:
        """Make the adapters resident, but for None and "". Return how many have to be loaded for it."""
        loaded = 0
        for adapter in filter(None, adapters):
            loaded += adapter not in self
            self[adapter] = None
            self.move_to_end(adapter)
        while len(self) > most:
            self.popitem(last=False)
        return loaded


class CostRunner:
    """Remembers only which adapters are resident."""

    def __init__(self, model: CostModel, *, max_loras: int, next_token: Callable[[Request], TokenId]) -> None:
        self._model = model
        self._max_loras = max_loras
        self._next_token = next_token
        self._resident = ResidentAdapters()

    def execute(self, plan: StepPlan) -> StepResult:
        model, adapters = self._model, [chunk.request.adapter for chunk in plan.chunks]
        load_s = self._resident.use(adapters, most=self._max_loras) * model.lora_load_s
        tokens = [self._next_token(chunk.request) if chunk.samples else None for chunk in plan.chunks]
        step_s = model.step_s((chunk.start, chunk.num_tokens) for chunk in plan.chunks)
        return StepResult(tokens, (step_s + load_s) / model.speed)
