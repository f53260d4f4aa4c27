"""Counts the tokens of the requests that were let go, for people and for the other pickers.

For people, the first tenants are counted by name, and all others together.
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
