"""Reads and checks the sampling fields of a body, and refuses fields that the engine does not support.

A made-up model chooses nothing, so it accepts these fields without effect, since clients send them to every
server. It refuses only log probabilities, which it would have to invent, and numbers that no server accepts.
Caller: the request reader.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from model_server.core.sampling import SamplingParams
from model_server.server.errors import ApiError
from model_server.server.prompts import ABSENT, option

_MAX_SEED = 2**63
_GREEDY_BELOW = 1e-5
"""This limit is vLLM's: logits divided by a smaller number would overflow."""


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields of both APIs. The server reads the fields from `min_p` on only to refuse them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: msgspec.Raw = ABSENT
    min_tokens: int | None = None
    stop_token_ids: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT


_NEUTRAL: dict[str, object] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
_NEUTRAL_OPTIONS: dict[str, tuple[Any, object]] = {
    "logit_bias": (dict[str, float], {}),
    "stop_token_ids": (list[int], []),
    "response_format": (dict[str, Any], {"type": "text"}),
}
"""Options whose values can be long, each with its type and the value that changes nothing."""


@dataclass(frozen=True, slots=True)
class SamplingReader:
    """Reads the sampling fields of requests to one server. `rng` draws a seed for a request without one."""

    made_up: bool
    rng: random.Random

    def read(
        self, body: SamplingBody, *, num_logprobs: int | None, seeds: Sequence[int | None]
    ) -> tuple[SamplingParams, ...]:
        """Return one set of parameters for each of `seeds`. None means that the client names no seed, and a
        seed is drawn.
        """
        options = {
            name: option(getattr(body, name), kind, param=name)
            for name, (kind, _) in _NEUTRAL_OPTIONS.items()
        }
        if self.made_up:
            self._one(body, num_logprobs=None, seed=0)
            if num_logprobs is not None:
                raise ApiError(
                    "logprobs is not supported: the answers of this server are made up, so their tokens have no probabilities.",
                    param="logprobs",
                )
            return (SamplingParams(),) * len(seeds)
        found = {name: (getattr(body, name), neutral) for name, neutral in _NEUTRAL.items()}
        found |= {name: (options[name], neutral) for name, (_, neutral) in _NEUTRAL_OPTIONS.items()}
        for name, (value, neutral) in found.items():
            if value not in (None, neutral):
                raise ApiError(f"{name} is not supported by this engine; leave it out.", param=name)
        return tuple(self._one(body, num_logprobs=num_logprobs, seed=seed) for seed in seeds)

    def _one(self, body: SamplingBody, *, num_logprobs: int | None, seed: int | None) -> SamplingParams:
        temperature = 1.0 if body.temperature is None else body.temperature
        top_k = body.top_k or 0
        try:
            return SamplingParams(
                temperature=0.0 if 0 < temperature < _GREEDY_BELOW else temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=0 if top_k == -1 else top_k,
                seed=self.rng.randrange(_MAX_SEED) if seed is None else seed,
                num_logprobs=num_logprobs,
            )
        except ValueError as error:
            raise ApiError(f"{error}.", param=str(error).split(" ", 1)[0]) from error
