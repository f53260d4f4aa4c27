"""The status of a running store: plain numbers since the start. The served tiers fill it in, and metrics show
it.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class StoreStatus:
    used_bytes: int = 0
    found_chunks: tuple[int, int, int] = (0, 0, 0)
    """The number of chunks that requests wanted and that were found in the device's memory, in main memory,
    on disk.
    """
    read_bytes: int = 0
    """The bytes read from disk."""
    written_bytes: int = 0
    dropped_blocks: int = 0
    """The blocks that were not stored, because room, time or a working disk was missing."""
    exact_loads: int = 0
    selective_loads: int = 0
    reordered_nodes: int = 0
    load_failures: int = 0
    write_failures: int = 0
    usable: bool = True
    """False while the store does not use its disk because a read or a write has failed."""
