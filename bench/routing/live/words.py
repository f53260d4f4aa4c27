"""Writes the prompts of the simulated requests as English text. Each word is one token for most tokenizers of
real models.

Equal segments become equal text, as in `model_server.sim.prompts`. An answer from which a later prompt
continues is the text that the server really sent. The generator calls this module.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Final

from model_server.sim.prompts import Segment
from tests.vllm_env import prompts

_WORDS: Final = tuple(f" {word}" for word in prompts.WORDS)


@functools.lru_cache(maxsize=2048)
def _words(segment_id: int, num_tokens: int) -> str:
    """Return this many words. A longer text of the same id begins with the shorter text."""
    return "".join(random.Random(segment_id).choices(_WORDS, k=num_tokens))


def prompt_of(segments: Sequence[Segment], *, answers: Mapping[int, str]) -> str:
    """Return the prompt of a request. `answers` is the text that servers sent, by segment id."""
    return "".join(
        answers.get(segment.segment_id) or _words(segment.segment_id, segment.num_tokens)
        for segment in segments
    )
