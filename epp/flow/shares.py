"""How many tokens were let go for each tenant, for people. The first tenants are counted by name, all others
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OTHER: Final = "(others)"
_MOST: Final = 32
"""The most tenants that are named; each is a time series."""


class Shares:
    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def add(self, tenant: str, tokens: int) -> None:
        if tenant in self._tokens:
            self._tokens[tenant] += tokens
            return
        name = tenant if len(self._tokens) < _MOST else OTHER
        self._tokens[name] = self._tokens.get(name, 0) + tokens

    @property
    def tokens(self) -> Mapping[str, int]:
        """Tokens by tenant, since the start."""
        return self._tokens
