"""What was let go: tokens for each tenant, for people and for the other pickers.

For people the first tenants are counted by name, all others together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epp.flow.elsewhere import FlowKey

OTHER: Final = "(others)"
_MOST: Final = 32
"""The most tenants that are named; each is a time series."""
_MOST_UNREPORTED: Final = 4096
"""The most tenants whose tokens are kept for the other pickers. While these cannot be sent, further tenants
are not counted.
"""


class Shares:
    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._unreported: dict[FlowKey, int] | None = None
        """Tokens that were not reported to other pickers yet. None: this picker reports nothing."""

    def add(self, priority: int, tenant: str, tokens: int, *, late: bool) -> None:
        mine = self._tokens
        named = tenant if tenant in mine or len(mine) < _MOST else OTHER
        mine[named] = mine.get(named, 0) + tokens
        charges = self._unreported
        if charges is not None and len(charges) < _MOST_UNREPORTED:
            key = (priority, tenant, late)
            charges[key] = charges.get(key, 0) + tokens

    def take_unreported(self) -> Mapping[FlowKey, int]:
        """Return tokens since the last call, by priority, tenant and whether they were late."""
        charges, self._unreported = self._unreported, {}
        return charges or {}

    @property
    def tokens(self) -> Mapping[str, int]:
        """Return tokens by tenant, since the start."""
        return self._tokens
