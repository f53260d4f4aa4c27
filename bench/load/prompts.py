"""Makes up the words of the load. The same seed gives the same words, and texts have the wanted length. Pure.

A word is about 1.4 tokens for common tokenizers. The real number of tokens is read from each answer's usage.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any, Final

_TOKENS_PER_WORD: Final = 1.4
_SYLLABLES: Final = (
    "ba",
    "den",
    "for",
    "gi",
    "ka",
    "lo",
    "mer",
    "ni",
    "or",
    "pa",
    "ras",
    "sto",
    "ti",
    "un",
    "ver",
    "wil",
)
_WORDS: Final = tuple(a + b for a in _SYLLABLES for b in _SYLLABLES)

Message = dict[str, str]


def text(seed: str, tokens: int) -> str:
    """Return a text of about this many tokens."""
    rng = random.Random(seed)
    words = rng.choices(_WORDS, k=max(1, round(tokens / _TOKENS_PER_WORD)))
    lines = [" ".join(words[n : n + 12]) for n in range(0, len(words), 12)]
    return ". ".join(lines)


@functools.lru_cache(maxsize=4096)
def shared_text(seed: str, tokens: int) -> str:
    """Return the same text as `text`, and keep it, because beginnings are used several times."""
    return text(seed, tokens)


def chat(model: str, messages: Sequence[Message], *, answer_tokens: int, salt: str = "") -> dict[str, Any]:
    """Return a streamed chat request, whose answer has the given length and ends with its usage."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**body, "cache_salt": salt} if salt else body


def zipf(rng: random.Random, kinds: int) -> int:
    """Return one of this many numbers. The first number is the most frequent."""
    return rng.choices(range(kinds), [1 / (rank + 1) for rank in range(kinds)])[0]
