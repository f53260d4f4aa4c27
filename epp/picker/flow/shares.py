"""Counts the tokens of the requests that were let go, for people and for the other pickers. For people, the
first tenants are counted by name, and all others together. Learns how many tokens the answers of each tenant
have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epp.picker.flow.elsewhere import FlowKey
from epp.picker.flow.queues import OTHERS

OTHERS_LABEL: Final = "(others)"
"""The name that people see for all other tenants together."""
_MOST: Final = 32
"""The most tenants that are named; each is a time series."""
_MOST_UNREPORTED: Final = 4096
"""The most rows that are kept for the other pickers. While these cannot be sent, further tenants are not
counted.
"""
_MOST_TENANTS: Final = 1024
"""The most tenants that are remembered. The tenant whose last sample is the oldest is forgotten first."""
_FIRST_TOKENS: Final = 200.0
"""The assumed length before the first sample."""
_MOST_SAMPLES: Final = 20
"""A mean follows the last samples: about this many of them count."""


class Shares:
    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        """By tenant, as people see it."""
        self._unreported: dict[FlowKey, int] | None = None
        """Tokens that were not reported to other pickers yet. None: this picker reports none."""

    def add(self, priority: int, tenant: str, tokens: int) -> None:
        shown, by_tenant = tenant, self._tokens
        if tenant not in by_tenant:
            named = len(by_tenant) - (OTHERS_LABEL in by_tenant)
            shown = OTHERS_LABEL if tenant == OTHERS or named >= _MOST else tenant
        by_tenant[shown] = by_tenant.get(shown, 0) + tokens
        charges = self._unreported
        if charges is not None and len(charges) < _MOST_UNREPORTED:
            key = (priority, tenant)
            charges[key] = charges.get(key, 0) + tokens

    def take_unreported(self) -> Mapping[FlowKey, int]:
        """Return the tokens since the last call, by priority and tenant. The first call returns nothing:
        from then on the tokens are kept for these calls.
        """
        charges, self._unreported = self._unreported, {}
        return charges or {}

    @property
    def tokens(self) -> Mapping[str, int]:
        """Return the tokens since the start, by tenant. Callers must not change this mapping."""
        return self._tokens


class AnswerLengths:
    """The tokens of answers by tenant, from sampled answers."""

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
