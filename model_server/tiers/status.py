"""The status of a running store: plain numbers since the start. The served tiers fill it in, and metrics show
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    used_bytes: int
    capacity_bytes: int
    tier_bytes: tuple[int, int]
    """The bytes of chunks in the device's memory and in main memory."""
    found_chunks: tuple[int, int, int]
    """The number of chunks that requests wanted and that were found in the device's memory, in main memory,
    on disk.
    """
    read_bytes: int
    """The bytes read from disk."""
    written_bytes: int
    stored_blocks: int
    dropped_blocks: int
    """The blocks that were not stored, because room, time or a working disk was missing."""
    waiting_bytes: int
    exact_loads: int
    selective_loads: int
    reordered_nodes: int
    load_failures: int
    write_failures: int
    usable: bool
    """False while the store does not use its disk because a read or a write has failed."""
