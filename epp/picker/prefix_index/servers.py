"""The servers of the prefix table: they join, change their size, restart and leave.

A large mirror is emptied in steps, which `eviction` takes. Until then it counts as empty.
"""

from __future__ import annotations

from epp.base.types import EndpointName
from epp.picker.prefix_index.removal import disown, shorten
from epp.picker.prefix_index.table import Mirror, PrefixTable

_MOST_RUNS_AT_ONCE = 8_192
"""Most runs that one call clears, in some 7 ms."""
_RUNS_A_STEP = 4_096
"""Most runs of a larger mirror that one call removes, in some 8 ms."""


def add_endpoint(table: PrefixTable, name: EndpointName, *, capacity_bytes: int) -> None:
    """Start an empty mirror, with the lowest free bit. Raises ValueError if the server has a mirror."""
    if name in table.mirrors:
        raise ValueError(f"{name} is in the table already")
    if None not in table.by_bit:
        table.by_bit.append(None)
    slot = table.by_bit.index(None)
    table.mirrors[name] = table.by_bit[slot] = Mirror(name, _capacity(capacity_bytes), bit=1 << slot)


def resize(table: PrefixTable, name: EndpointName, *, capacity_bytes: int) -> None:
    """Set the size, which takes effect with the next `evict`."""
    mirror = table.mirrors[name]
    mirror.capacity_bytes = _capacity(capacity_bytes)
    table.over[mirror] = None


def _capacity(capacity_bytes: int) -> int:
    if capacity_bytes < 0:
        raise ValueError(f"a cache holds nothing or more: {capacity_bytes=}")
    return capacity_bytes


def drop_endpoint(table: PrefixTable, name: EndpointName) -> None:
    mirror = table.mirrors.pop(name)
    table.over.pop(mirror, None)
    _empty(table, mirror)


def clear_endpoint(table: PrefixTable, name: EndpointName) -> None:
    """Forget everything that the server held, because it restarted with a cold cache."""
    _empty(table, table.mirrors[name])


def _empty(table: PrefixTable, mirror: Mirror) -> None:
    table.emptied[mirror] = None
    table.hidden |= mirror.bit
    for run in mirror.guessed:
        if run not in mirror.last_use:
            table.guessed_entries -= len(run.hashes)
            disown(table, mirror, run)
    mirror.guessed, mirror.guessed_bytes = {}, 0
    if len(mirror.last_use) > _MOST_RUNS_AT_ONCE:
        return
    for run in mirror.last_use:
        disown(table, mirror, run)
    table.entries -= mirror.entries
    while mirror.oldest is not None:  # so that the garbage collector for cycles has no work
        mirror.unlink(mirror.oldest)
    mirror.last_use.clear()
    mirror.used_bytes = mirror.entries = 0
    _emptied(table, mirror)


def empty_further(table: PrefixTable) -> None:
    """Remove the next entries of the mirror that has been waiting longest to be emptied."""
    mirror = next(iter(table.emptied))
    for _ in range(_RUNS_A_STEP):
        use = mirror.oldest
        if use is None:
            _emptied(table, mirror)
            return
        if use.leaf is not None:
            shorten(table, mirror, use.leaf, keep_to=use.leaf.start)
        else:
            mirror.used_bytes -= use.size_bytes
            mirror.unlink(use)


def _emptied(table: PrefixTable, mirror: Mirror) -> None:
    del table.emptied[mirror]
    table.hidden &= ~mirror.bit
    if table.mirrors.get(mirror.name) is not mirror:
        table.by_bit[mirror.bit.bit_length() - 1] = None
