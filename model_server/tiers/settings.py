"""What a selective load is told: how much to keep, how many heads look, and how much they have to agree.

Plain values, checked once. Callers: everything that selects, and the hash key under which approximate results are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_server.tiers.similarity import DEFAULT_ALPHA


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    ratio: float = 0.5
    """The share of a prefix's tokens that attention gets, in layers whose heads agree."""
    probe_heads: int = 3
    alpha: float = DEFAULT_ALPHA

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is over 0 and at most 1, not {self.ratio}")
        if self.probe_heads < 1:
            raise ValueError(f"at least one head has to look, not {self.probe_heads}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is over 0 and at most 1, not {self.alpha}")

    @property
    def cache_key(self) -> str:
        """What the hashes of blocks cover that were computed after such a load: they are no exact ones."""
        return f"sel:{self.ratio:g}"

    def kept(self, num_tokens: int) -> int:
        return max(1, round(self.ratio * num_tokens))
