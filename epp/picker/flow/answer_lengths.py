"""Learns how many tokens the answers of each tenant have, from sampled answers. Flow control charges them."""

from __future__ import annotations

from typing import Final

_MOST_TENANTS: Final = 1024
"""The most tenants that are remembered. The tenant whose last sample is the oldest is forgotten first."""
_FIRST_TOKENS: Final = 200.0
"""The assumed length before the first sample."""
_MOST_SAMPLES: Final = 20
"""A mean follows the last samples: about this many of them count."""


class AnswerLengths:
    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}
        """The mean of each tenant, and the number of samples that count in it. The latest sample is last."""
        self._mean_of_all = _FIRST_TOKENS, 0

    def expected(self, tenant: str, *, most: float) -> float:
        """Return the tokens that an answer will probably have. most: the request's own limit."""
        return min(most, self._means.get(tenant, self._mean_of_all)[0])

    def learn(self, tenant: str, tokens: int) -> None:
        mean, samples = self._means.pop(tenant, (self._mean_of_all[0], 0))
        self._means[tenant] = _with(mean, samples, tokens)
        self._mean_of_all = _with(*self._mean_of_all, tokens)
        if len(self._means) > _MOST_TENANTS:
            del self._means[next(iter(self._means))]


def _with(mean: float, samples: int, tokens: int) -> tuple[float, int]:
    samples = min(samples, _MOST_SAMPLES) + 1
    return mean + (tokens - mean) / samples, samples
