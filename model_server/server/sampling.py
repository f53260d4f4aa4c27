"""Reads and checks the sampling fields of a body.

A made-up model chooses no tokens. So fields that only weigh tokens have no effect there, since clients send
them to every server. It refuses log probabilities, which it would have to invent, and numbers that no server
accepts. Caller: the request reader.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from model_server.core.sampling import SamplingParams
from model_server.server.errors import ApiError
from model_server.server.prompts import ABSENT, option

_MAX_SEED = 2**63
_GREEDY_BELOW = 1e-5
"""This limit is vLLM's: logits divided by a smaller number would overflow."""
_MOST_BIAS = 100.0
"""A larger bias counts as this one, as in vLLM."""


class SamplingBody(msgspec.Struct, kw_only=True):
    """The sampling fields of both APIs."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: msgspec.Raw = ABSENT
    stop_token_ids: msgspec.Raw = ABSENT


_NUMBERS = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")


@dataclass(frozen=True, slots=True)
class SamplingReader:
    """Reads the sampling fields of requests to one server. `rng` draws a seed for a request without one."""

    made_up: bool
    rng: random.Random
    eos_token_ids: frozenset[int] = frozenset()
    vocabulary_size: int | None = None

    def read(
        self, body: SamplingBody, *, num_logprobs: int | None, seeds: Sequence[int | None]
    ) -> tuple[SamplingParams, ...]:
        """Return one set of parameters for each of `seeds`. None means that the client names no seed, and a
        seed is drawn.
        """
        given: dict[int, float] | None = option(body.logit_bias, dict[int, float], param="logit_bias")
        listed: list[int] | None = option(body.stop_token_ids, list[int], param="stop_token_ids")
        bias, stops = given or {}, listed or []
        self._check_tokens(bias, param="logit_bias")
        self._check_tokens(stops, param="stop_token_ids")
        if self.made_up and num_logprobs is not None:
            raise ApiError(
                "logprobs is not supported: the answers of this server are made up, so their tokens have no probabilities.",
                param="logprobs",
            )
        params = self._params(body, num_logprobs=num_logprobs)
        params = replace(
            params,
            logit_bias=tuple(
                (token, max(-_MOST_BIAS, min(value, _MOST_BIAS))) for token, value in bias.items()
            ),
            stop_token_ids=frozenset(stops),
            end_token_ids=self.eos_token_ids.union(stops) if params.min_tokens else frozenset(),
        )
        if self.made_up:
            return (params,) * len(seeds)
        drawn = [self.rng.randrange(_MAX_SEED) if seed is None else seed for seed in seeds]
        return tuple(replace(params, seed=seed) for seed in drawn)

    def _check_tokens(self, tokens: Sequence[int] | dict[int, float], *, param: str) -> None:
        size = self.vocabulary_size or 2**32
        if wrong := [token for token in tokens if not 0 <= token < size]:
            raise ApiError(f"Token {wrong[0]} is out of the model's vocabulary.", param=param)

    def _params(self, body: SamplingBody, *, num_logprobs: int | None) -> SamplingParams:
        temperature = 1.0 if body.temperature is None else body.temperature
        top_k = body.top_k or 0
        given = {name: value for name in _NUMBERS if (value := getattr(body, name)) is not None}
        try:
            return SamplingParams(
                temperature=0.0 if 0 < temperature < _GREEDY_BELOW else temperature,
                top_k=0 if top_k == -1 else top_k,
                num_logprobs=num_logprobs,
                **given,
            )
        except ValueError as error:
            raise ApiError(f"{error}.", param=str(error).split(" ", 1)[0]) from error
