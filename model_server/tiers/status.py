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
    """Chunks that the device and main memory hold."""
    found_chunks: tuple[int, int, int]
    """Where chunks were found that a request wanted: device, main memory, disk."""
    read_bytes: int
    """From disk."""
    written_bytes: int
    stored_blocks: int
    dropped_blocks: int
    """Not stored, for want of room, time or a working disk."""
    waiting_bytes: int
    exact_loads: int
    selective_loads: int
    computed_instead: int
    """Prefixes that were not loaded because computing them was expected to take less time."""
    reordered_nodes: int
    load_failures: int
    write_failures: int
    usable: bool
    """Neither reading nor writing has just failed."""
