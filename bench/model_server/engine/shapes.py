"""Lists the sizes of models whose weights are made up, and lengths of prompts. Pure: no torch.

The benches of the engine and of GPUs call this module.
"""

from __future__ import annotations

import itertools
import math
import random

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "gpt2": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 50257,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
"""The shape of Llama with 8 billion parameters, a shape of GPT-2's size, and a shape for tests."""


def uneven_lengths(count: int) -> list[int]:
    """Return lengths like those of people's prompts: log-normal about 360 tokens. A length outside of 256 to
    512 is drawn again. The lengths are always the same.
    """
    rng = random.Random("001-6")
    drawn = (round(rng.lognormvariate(math.log(360), 0.5)) for _ in itertools.count())
    return list(itertools.islice((tokens for tokens in drawn if 256 <= tokens <= 512), count))
