"""Prompts of the simulated requests as text that the made-up tokenizer cuts into exactly as many tokens.

Equal segments are equal text, as in `model_server.sim.prompts`. An answer that a later prompt goes on from is what the server
really said. Callers: the generator.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Final

from model_server.sim.prompts import Segment

_WORDS: Final = tuple(f" {a}{b}{c}" for a in "bdfgklmnprstvz" for b in "aeiou" for c in "bdfgklmnprstvz")
"""A token each, of four bytes with its space."""


@functools.lru_cache(maxsize=2048)
def _words(segment_id: int, num_tokens: int) -> str:
    """A longer text of the same id begins with the shorter one."""
    return "".join(random.Random(segment_id).choices(_WORDS, k=num_tokens))


def prompt_of(segments: Sequence[Segment], *, answers: Mapping[int, str]) -> str:
    """`answers`: what servers said, by segment id."""
    return "".join(
        answers.get(segment.segment_id) or _words(segment.segment_id, segment.num_tokens)
        for segment in segments
    )
