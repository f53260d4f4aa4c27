"""Makes the requests that every engine gets: rounds of prompts, as token ids. Each round is sent at once when
the previous round has ended. Pure.

Rows have the ids of the caching documents. The rows `alone` and `together` measure the time to the first
token. In the rows of `TIMED`, requests come one by one, at moments of the engine's own CPU clock. A turn is
all rounds of a row on one engine, whose cache is empty before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

Prompt = list[int]
TextOf = Callable[[str, int], Prompt]
"""Returns text of exactly this many tokens. The same name always gives the same text."""

ENGINES = ("ours", "transformers", "vllm")
BLOCK_TOKENS = 32
"""The block size of all engines. vLLM's CPU backend refuses 16. With the 256 of transformers fewer tokens
would be shared.
"""
MAX_REQUESTS = 64
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Round:
    prompts: Sequence[Prompt]
    answer_tokens: int
    arrivals_s: Sequence[float] = ()
    """The times at which the prompts come. Empty means that all come at once."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The results of an engine for the rounds of a row."""

    round_cpu_s: Sequence[float]
    round_wall_s: Sequence[float]
    round_hit_tokens: Sequence[int]
    answers: Sequence[Sequence[int]]
    token_s: Sequence[Sequence[float]] = ()
    """The times of the tokens of each request that came at a moment, counted from this moment."""
    elapsed_s: float = 0.0
    """The time of the round in which requests came at moments, including the time in which there was nothing
    to do.
    """


def twice(text_of: TextOf, repeat: int) -> list[Round]:
    """Return row 001-6: 20 prompts of 256 to 512 tokens, and the same prompts again, with 10 answered
    tokens.
    """
    prompts = [text_of(f"{repeat} {n}", 256 + 256 * n // 19) for n in range(20)]
    return [Round(prompts, 10), Round(prompts, 10)]


def few_distinct(text_of: TextOf, repeat: int) -> list[Round]:
    """Return one half of row 003-5: 32 requests of 856 tokens over 7 distinct prompts, with 16 answered
    tokens.
    """
    prompts = [text_of(f"{repeat} distinct {n}", 856) for n in range(7)]
    return [Round([prompts[n % 7] for n in range(32)], 16)]


def alone(text_of: TextOf, repeat: int) -> list[Round]:
    """Return four prompts of 512 tokens, one after the other, with one answered token, and then the same four
    again. In between, all four are answered with two tokens, because transformers keeps nothing of a
    request that ends with its prompt.
    """
    prompts = [text_of(f"{repeat} alone {n}", 512) for n in range(4)]
    single = [Round([prompt], 1) for prompt in prompts]
    return [*single, Round(prompts, 2), *single]


def together(text_of: TextOf, repeat: int) -> list[Round]:
    """Return eight prompts of 512 tokens at once, with one answered token, and then the same prompts again.
    The time ends when the last prompt has its first token.
    """
    prompts = [text_of(f"{repeat} together {n}", 512) for n in range(8)]
    return [Round(prompts, 1), Round(prompts, 2), Round(prompts, 1)]


def arriving(
    text_of: TextOf,
    repeat: int,
    *,
    rate_per_s: float,
    shared_tokens: int,
    own_tokens: int,
    answer_tokens: int,
    requests: int,
) -> list[Round]:
    """Return rows 001-7 and 001-8 with Poisson arrivals. One prompt comes first and alone, so that the shared
    part is cached, as it is for 499 of the document's 500 requests.
    """
    shared = text_of(f"{repeat} shared", shared_tokens)
    prompts = [shared + text_of(f"{repeat} own {n}", own_tokens) for n in range(requests + 1)]
    rng, now_s = random.Random(repeat), 0.0
    times = [now_s := now_s + rng.expovariate(rate_per_s) for _ in range(requests)]
    return [Round(prompts[:1], 2), Round(prompts[1:], answer_tokens, times)]


def warm_up(text_of: TextOf) -> list[Round]:
    """Return work that each engine compiles or allocates at the first requests of a kind. This work is not
    counted.
    """
    prompts = [text_of(f"warm {n}", 300) for n in range(8)]
    return [Round(prompts, 8), Round(prompts[:1], 1), Round(prompts, 1)]


_serving = partial(arriving, shared_tokens=320, own_tokens=533, answer_tokens=150, requests=16)
"""The document's 330 and 550 tokens, shortened so that the shared part has whole blocks: 37.5 %
of a prompt.
"""
ROWS: dict[str, Callable[[TextOf, int], list[Round]]] = {
    "001-6": twice,
    "003-5": few_distinct,
    "alone": alone,
    "together": together,
    "001-7": partial(_serving, rate_per_s=0.1),
    "001-7 above": partial(_serving, rate_per_s=0.3),
    "001-8": partial(
        arriving, rate_per_s=0.2, shared_tokens=0, own_tokens=512, answer_tokens=32, requests=10
    ),
}
TIMED = ("001-7", "001-7 above", "001-8")
"""Rows for our engine and vLLM only, because transformers computes in a thread of its own."""
FIRST_TOKENS = ("alone", "together")
"""Rows in which the cache does not know the rounds before the middle one, but knows the rounds after it."""


def prompt_tokens(rounds: Sequence[Round]) -> int:
    return sum(len(prompt) for one in rounds for prompt in one.prompts)


def answer_tokens(rounds: Sequence[Round]) -> int:
    return sum(len(one.prompts) * one.answer_tokens for one in rounds)


def num_blocks(rounds: Sequence[Round]) -> int:
    """Return enough blocks that nothing is ever evicted, whether blocks are shared or not."""
    return sum(
        -(-(len(prompt) + one.answer_tokens) // BLOCK_TOKENS) + 1 for one in rounds for prompt in one.prompts
    )
