"""The status of a running store: plain numbers since the start. The served tiers fill it in, and metrics show
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    used_bytes: int
    found_chunks: tuple[int, int, int]
    """The number of chunks that requests wanted and that were found in the device's memory, in main memory,
    on disk.
    """
    read_bytes: int
    """The bytes read from disk."""
    written_bytes: int
    dropped_blocks: int
    """The blocks that were not stored, because room, time or a working disk was missing."""
    exact_loads: int
    selective_loads: int
    reordered_nodes: int
    load_failures: int
    write_failures: int
    usable: bool
    """False while the store does not use its disk because a read or a write has failed."""
