"""Events about a store's content, from any thread. The events are plain values.

Callers: the store sends them, and the server turns them into KV events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_server.core.hashing import BlockHash, PrefixScope

PLAIN = PrefixScope()


@dataclass(frozen=True, slots=True)
class TierStored:
    """Consecutive blocks of one prefix can be loaded from the store."""

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
    """These blocks can no longer be loaded from the store."""

    hashes: Sequence[BlockHash]


TierEvent = TierStored | TierRemoved
Tell = Callable[[TierEvent], None]


def to_nobody(_: TierEvent) -> None:
    """Ignore the event."""
