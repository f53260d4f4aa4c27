"""What the picker learns about a model from all of its servers together: the size of its tokens, and how much
its caches keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from epp.endpoints.cache_size import CacheSize
from epp.endpoints.learning import TokenEstimate


@dataclass(frozen=True, slots=True)
class Learned:
    """What is learned about one model. The fleet keeps the prefill rate, since servers differ in it."""

    tokens: TokenEstimate
    cache: CacheSize
