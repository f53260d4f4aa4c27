"""Keeps the prefix table in its bounds: bytes of unknown content take room, and the oldest entries make room.

Eviction follows the servers' own order: least recently used first. Chunks that were last used together are
evicted from the tail of their chain, since a head without its tail is still useful, and a tail without its
head is useless. `evict` works in bounded portions, at a moment when no request waits.
"""

from __future__ import annotations

import heapq
import sys

from epp.base.types import EndpointName
from epp.picker.prefix_index.removal import shorten
from epp.picker.prefix_index.servers import empty_further
from epp.picker.prefix_index.table import Mirror, PrefixTable, Use

_ANY = sys.maxsize
"""More chunks than any server holds."""


def charge(table: PrefixTable, name: EndpointName, *, size_bytes: int, now: float) -> None:
    """Count bytes in the server's cache whose prompt is not known. A server that has left is ignored."""
    mirror = table.taking(name)
    if mirror is None or size_bytes <= 0:
        return
    newest = mirror.newest
    if newest is not None and newest.leaf is None:
        # No other use came between, so one use keeps the order,
        # and the mirror of a server that only answers stays small.
        newest.at, newest.size_bytes = table.advance(now), newest.size_bytes + size_bytes
    else:
        mirror.append(Use(table.advance(now), None, size_bytes))
    mirror.used_bytes += size_bytes
    if mirror.used_bytes > mirror.capacity_bytes:
        table.over[mirror] = None


def evict(table: PrefixTable, now: float, *, budget: int = 256) -> int:
    """Bring the table back into its bounds: first age, then each server's capacity, then the total.
    Returns the number of entries evicted.

    `budget` bounds the work: runs and charges removed, about a microsecond each. Call again for the rest.
    """
    now = table.advance(now)
    if table.emptied:
        empty_further(table)
    budget, evicted = _expire(table, now, budget=budget)
    while table.over and budget > 0:
        mirror = next(iter(table.over))
        while mirror.used_bytes > mirror.capacity_bytes and budget > 0:
            evicted += _evict_oldest(table, mirror, most_bytes=mirror.used_bytes - mirror.capacity_bytes)
            budget -= 1
        if mirror.used_bytes <= mirror.capacity_bytes:
            del table.over[mirror]
    return evicted + _bound(table, budget=budget)


def _expire(table: PrefixTable, now: float, *, budget: int) -> tuple[int, int]:
    """Evict entries that were unused for the TTL. Returns the rest of the budget, and the number of
    entries evicted.
    """
    evicted = 0
    if now < table.expiry_due:
        return budget, evicted
    oldest_at = now
    for mirror in table.mirrors.values():
        while (use := mirror.oldest) is not None and use.at + table.ttl_s <= now:
            if budget <= 0:
                return budget, evicted
            evicted += _evict_oldest(table, mirror)
            budget -= 1
        if use is not None:
            oldest_at = min(oldest_at, use.at)
    table.expiry_due = oldest_at + table.ttl_s
    return budget, evicted


def _bound(table: PrefixTable, *, budget: int) -> int:
    """Evict the oldest entries of all servers until the total is within its bound."""
    excess = table.entries - sum(mirror.entries for mirror in table.emptied) - table.max_entries
    if excess <= 0:
        return 0
    heads = [(m.oldest.at, m.bit, m) for m in table.mirrors.values() if m.oldest is not None]
    heapq.heapify(heads)
    left = excess
    while left > 0 and budget > 0:
        mirror = heads[0][2]
        left -= _evict_oldest(table, mirror, most_entries=left)
        budget -= 1
        if mirror.oldest is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (mirror.oldest.at, mirror.bit, mirror))
    return excess - left


def _evict_oldest(
    table: PrefixTable, mirror: Mirror, *, most_bytes: int = _ANY, most_entries: int = _ANY
) -> int:
    """Evict from the deepest run of the oldest use, only as much as is needed to free the bytes or
    entries. Returns the number of entries freed.
    """
    use = mirror.oldest
    assert use is not None, "over a bound with nothing to evict"
    run = use.leaf
    if run is None:
        freed_bytes = min(use.size_bytes, most_bytes)
        use.size_bytes -= freed_bytes
        mirror.used_bytes -= freed_bytes
        if not use.size_bytes:
            mirror.unlink(use)
        return 0
    keep_bytes = table.schedule.end_bytes(run.end) - most_bytes
    keep_to = max(run.start, run.end - most_entries, table.schedule.chunks_in(max(keep_bytes, 0)))
    before = mirror.entries
    shorten(table, mirror, run, keep_to=keep_to)
    freed = before - mirror.entries
    mirror.evicted += freed
    return freed
