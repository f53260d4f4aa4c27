"""What the picker learns about a model from all of its servers together: the size of its tokens, and how much
its caches keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from epp.endpoints.cache_size import CacheSize
from epp.endpoints.learning import TokenEstimate


@dataclass(frozen=True, slots=True)
class Learned:
    """Of one model. Its prefill rate is kept by the fleet, since each server deviates from it by itself."""

    tokens: TokenEstimate
    cache: CacheSize
