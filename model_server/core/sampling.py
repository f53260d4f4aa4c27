"""The settings by which a request's tokens are chosen, and the log probabilities of a chosen token. This
module holds values only. The runner chooses.

Callers: all code that makes requests, and the runners.
"""

import math
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""The most alternatives for each token, as in the OpenAI API and vLLM."""
MAX_TEMPERATURE = 2
"""The OpenAI API and vLLM have the same limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 0.0
    """The temperature. At 0 the most likely token is always chosen."""
    top_p: float = 1.0
    """Tokens are chosen only among the most likely tokens that together have at least this probability."""
    top_k: int = 0
    """Tokens are chosen only among this many of the most likely tokens. 0 means all."""
    seed: int = 0
    """The seed and the token's position together decide the random draw. Equal seeds give equal answers,
    whatever else is in the batch.
    """
    min_p: float = 0.0
    """Tokens are chosen only among those with at least this share of the most likely token's probability."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """These numbers are added to the logits of these tokens."""
    min_tokens: int = 0
    """No token ends the answer before it has this many tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, besides the model's own."""
    end_token_ids: frozenset[int] = frozenset()
    """All tokens that end the answer. They are not chosen before the answer has `min_tokens`."""
    num_logprobs: int | None = None
    """Return the log probability of each token, and of this many most likely tokens in its place. None means
    that no log probability is returned.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}, but it must be between 0 and {MAX_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but it must be over 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, but it must not be negative")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, but it must be between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                raise ValueError(f"{name} is {value}, but it must be between -2 and 2")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, but it must be over 0")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}, but it must not be negative")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.num_logprobs}, but it must be between 0 and {MAX_LOGPROBS}")


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the model itself, before temperature and cuts."""

    logprob: float
    """The log probability of the chosen token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log probabilities, the most likely first."""
