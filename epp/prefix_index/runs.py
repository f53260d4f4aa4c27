"""The pieces of the prefix table: runs of chunks, uses of chains, and one mirror for each server's cache.

A run is a span of consecutive chunks that has the same holders throughout, so a long prompt is a few objects however
many chunks it has. A use is one moment at which a server worked on a chain; all runs of that chain then point to it,
and later uses take the shared ones over. What still points to a use is therefore the tail of its chain, which ends in
`Use.leaf`: that makes a touch cost one step for each run, and gives tail-first eviction without any order among runs.

Used by `epp.prefix_index.forest` and `epp.prefix_index.table` only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from epp.types import EndpointName


@dataclass(slots=True, eq=False)
class Run:
    """Chunks `start` to `end` (half open) of the chain that the last hash names."""

    hashes: array[int]
    """Unsigned 64-bit, never empty."""
    start: int
    parent: Run | None
    """The run that ends where this one starts; None for the first of a chain."""
    holders: int = 0
    """Bit mask of the mirrors that hold it; a subset of the parent's holders."""
    children: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


@dataclass(slots=True, eq=False)
class Use:
    """One moment at which a server had a whole chain in hand, or when anonymous bytes were written to its cache."""

    at: float
    leaf: Run | None
    """The deepest run of the chain; None: anonymous bytes."""
    size_bytes: int = 0
    """Of anonymous bytes; a chain's size follows from its runs."""
    older: Use | None = None
    newer: Use | None = None


@dataclass(slots=True, eq=False)
class Mirror:
    """What one server's cache is assumed to hold, its uses in a linked list from oldest to newest."""

    name: EndpointName
    capacity_bytes: int
    bit: int = 0
    """In `Run.holders`; the forest assigns it."""
    used_bytes: int = 0
    entries: int = 0
    """Chunks held."""
    evicted: int = 0
    """Chunks evicted so far."""
    last_use: dict[Run, Use] = field(default_factory=dict)
    """For every run that it holds."""
    oldest: Use | None = None
    newest: Use | None = None

    def append(self, use: Use) -> None:
        """Make `use` the newest."""
        use.older = self.newest
        if self.newest is None:
            self.oldest = use
        else:
            self.newest.newer = use
        self.newest = use

    def prepend(self, use: Use) -> None:
        """Make `use` the oldest."""
        use.newer = self.oldest
        if self.oldest is None:
            self.newest = use
        else:
            self.oldest.older = use
        self.oldest = use

    def unlink(self, use: Use) -> None:
        """Take `use` out; nothing points to it any more, or its bytes are gone."""
        if use.older is None:
            self.oldest = use.newer
        else:
            use.older.newer = use.newer
        if use.newer is None:
            self.newest = use.older
        else:
            use.newer.older = use.older
        use.older = use.newer = None

    def assign(self, run: Run, use: Use) -> None:
        """`run` was last used by `use`; a use that has lost its deepest run has lost all of them."""
        before = self.last_use.get(run)
        self.last_use[run] = use
        if before is not None and before.leaf is run:
            self.unlink(before)

    def uses(self) -> Iterator[Use]:
        """Oldest first."""
        use = self.oldest
        while use is not None:
            yield use
            use = use.newer

    def clear(self) -> None:
        """Forget everything, without leaving the linked list to the cyclic garbage collector."""
        while self.oldest is not None:
            self.unlink(self.oldest)
        self.last_use.clear()
        self.used_bytes = self.entries = 0


def whole_chain(run: Run) -> array[int]:
    """The hashes from the chain's first chunk to the run's last."""
    parts, above = [run.hashes], run.parent
    while above is not None:
        parts.append(above.hashes)
        above = above.parent
    whole = array("Q")
    for part in reversed(parts):
        whole += part
    return whole
