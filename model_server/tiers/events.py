"""What a store tells of its content, as it happens, by whichever thread makes it happen. Plain values.

Callers: the store and its reader (tell), the server (turns them into KV events).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from model_server.core.hashing import BlockHash, PrefixScope

PLAIN = PrefixScope()
Medium = Literal["CPU", "STORAGE"]
"""By vLLM's names: main memory, and disk."""


@dataclass(frozen=True, slots=True)
class TierStored:
    """Consecutive blocks of one prefix can be loaded from here."""

    medium: Medium
    hashes: Sequence[BlockHash]
    first_block: int
    parent: BlockHash | None
    token_ids: Sequence[int] = ()
    """Empty where the store no longer knows them: it keeps hashes only."""
    scope: PrefixScope = PLAIN


@dataclass(frozen=True, slots=True)
class TierRemoved:
    """They cannot any more."""

    medium: Medium
    hashes: Sequence[BlockHash]


TierEvent = TierStored | TierRemoved
Tell = Callable[[TierEvent], None]


def to_nobody(_: TierEvent) -> None:
    """No one listens."""
