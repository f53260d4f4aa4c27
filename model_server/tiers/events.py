"""Events about a store's content, from any thread. The events are plain values.

Callers: the store and its reader send them, and the server turns them into KV events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from model_server.core.hashing import BlockHash, PrefixScope

PLAIN = PrefixScope()
Medium = Literal["CPU", "STORAGE"]
"""vLLM's names of main memory and disk."""


@dataclass(frozen=True, slots=True)
class TierStored:
    """Consecutive blocks of one prefix can be loaded from this tier."""

    medium: Medium
    hashes: Sequence[BlockHash]
    first_block: int
    parent: BlockHash | None
    token_ids: Sequence[int] = ()
    """The blocks' tokens. They are missing if the store no longer knows them, because it keeps only
    hashes.
    """
    scope: PrefixScope = PLAIN


@dataclass(frozen=True, slots=True)
class TierRemoved:
    """These blocks can no longer be loaded from this tier."""

    medium: Medium
    hashes: Sequence[BlockHash]


TierEvent = TierStored | TierRemoved
Tell = Callable[[TierEvent], None]


def to_nobody(_: TierEvent) -> None:
    """Ignore the event."""
