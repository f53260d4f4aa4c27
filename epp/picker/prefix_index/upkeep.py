"""Changes the prefix table besides the prompts: servers join, change their size, restart and leave; the
oldest entries make room; chunks go that a server reports to lack.

Eviction follows the servers' own order: least recently used first. Chunks that were last used together are
evicted from the tail of their chain, since a head without its tail is still useful, and a tail without its
head is useless. So a chunk goes only together with all that is proven behind it. Guesses that cover the chunk
keep it.

`evict` works in bounded portions, at a moment when no request waits. It also empties large mirrors step by
step. Until then they count as empty.
"""

import heapq
import sys
from collections.abc import Sequence

from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index.table import Mirror, PrefixTable, Run, chunks_in, end_bytes

_ANY = sys.maxsize
"""More chunks than any server holds."""
_RUNS_A_STEP = 4_096
"""Most runs that one call removes of a mirror that is being emptied, in some 8 ms."""


# -- servers -------------------------------------------------------------------------------------------------


def add_endpoint(table: PrefixTable, name: EndpointName, *, capacity_bytes: int) -> None:
    """Start an empty mirror, with the lowest free bit."""
    assert name not in table.mirrors
    if not table.free_bits:
        table.free_bits.append(len(table.by_bit))
        table.by_bit.append(None)
    slot = heapq.heappop(table.free_bits)
    table.mirrors[name] = table.by_bit[slot] = Mirror(name, capacity_bytes, bit=1 << slot)


def resize(table: PrefixTable, name: EndpointName, *, capacity_bytes: int) -> None:
    """Set the size, which takes effect with the next `evict`."""
    mirror = table.mirrors[name]
    mirror.capacity_bytes = capacity_bytes
    table.over[mirror] = None


def drop_endpoint(table: PrefixTable, name: EndpointName) -> None:
    mirror = table.mirrors.pop(name)
    table.over.pop(mirror, None)
    _empty(table, mirror)


def clear_endpoint(table: PrefixTable, name: EndpointName) -> None:
    """Forget everything that the server held, because it restarted with a cold cache."""
    _empty(table, table.mirrors[name])


def _empty(table: PrefixTable, mirror: Mirror) -> None:
    table.emptied[mirror] = None
    for run in mirror.guessed:
        if run not in mirror.last_use:
            table.guessed_entries -= len(run.hashes)
            disown(table, mirror, run)
    mirror.guessed, mirror.guessed_bytes = {}, 0
    _empty_further(table, mirror)


def _empty_further(table: PrefixTable, mirror: Mirror) -> None:
    """Remove the next entries of a mirror that is being emptied."""
    for _ in range(_RUNS_A_STEP):
        use = mirror.oldest
        if use is None:
            del table.emptied[mirror]
            if table.mirrors.get(mirror.name) is not mirror:
                table.by_bit[mirror.bit.bit_length() - 1] = None
                heapq.heappush(table.free_bits, mirror.bit.bit_length() - 1)
            return
        shorten(table, mirror, use.leaf, keep_to=use.leaf.start)


# -- eviction -----------------------------------------------------------------------------------------------


def evict(table: PrefixTable, *, budget: int = 256) -> None:
    """Bring the table back into its bounds: first each server's capacity, then the total.

    `budget` bounds the work: runs removed, about a microsecond each. Call again for the rest.
    """
    if table.emptied:
        _empty_further(table, next(iter(table.emptied)))
    while table.over and budget > 0:
        mirror = next(iter(table.over))
        while mirror.used_bytes > mirror.capacity_bytes and budget > 0:
            _evict_oldest(table, mirror, most_bytes=mirror.used_bytes - mirror.capacity_bytes)
            budget -= 1
        if mirror.used_bytes <= mirror.capacity_bytes:
            del table.over[mirror]
    _bound(table, budget=budget)


def _bound(table: PrefixTable, *, budget: int) -> None:
    """Evict the oldest entries of all servers until the total is within its bound."""
    excess = table.entries - sum(mirror.entries for mirror in table.emptied) - table.max_entries
    if excess <= 0:
        return
    heads = [(m.oldest.at, m.bit, m) for m in table.mirrors.values() if m.oldest is not None]
    heapq.heapify(heads)
    while excess > 0 and budget > 0:
        mirror = heads[0][2]
        excess -= _evict_oldest(table, mirror, most_entries=excess)
        budget -= 1
        if mirror.oldest is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (mirror.oldest.at, mirror.bit, mirror))


def _evict_oldest(
    table: PrefixTable, mirror: Mirror, *, most_bytes: int = _ANY, most_entries: int = _ANY
) -> int:
    """Evict from the deepest run of the oldest use, only as much as is needed to free the bytes or
    entries. Returns the number of entries freed.
    """
    use = mirror.oldest
    assert use is not None, "over a bound with nothing to evict"
    run = use.leaf
    keep_bytes = end_bytes(table.schedule, run.end) - most_bytes
    keep_to = max(run.start, run.end - most_entries, chunks_in(table.schedule, max(keep_bytes, 0)))
    before = mirror.entries
    shorten(table, mirror, run, keep_to=keep_to)
    freed = before - mirror.entries
    mirror.evicted += freed
    return freed


# -- removal ------------------------------------------------------------------------------------------------


def forget(
    table: PrefixTable, name: EndpointName, chain: Sequence[ChunkHash], *, keep: int, as_of: float
) -> int:
    """Forget that the server holds chunk `keep` of the chain and anything that continues it, unless the
    chunk was used after `as_of`. Returns the number of entries forgotten. A server that has left is
    ignored.
    """
    mirror = table.taking(name)
    runs, covered = table.path(chain[: keep + 1])
    if mirror is None or covered <= keep:
        return 0
    run = runs[-1]
    if run not in mirror.last_use or mirror.last_use[run].at > as_of:
        return 0
    before = mirror.entries
    if run.children:
        for below in _held_below(mirror, run):
            shorten(table, mirror, below, keep_to=below.start)
    shorten(table, mirror, run, keep_to=keep)
    return before - mirror.entries


def shorten(table: PrefixTable, mirror: Mirror, run: Run, *, keep_to: int) -> None:
    """Let the chunks of a run from `keep_to` on be no longer proven for a server for which nothing below the
    run is proven. So the run's last use ends there.
    """
    if run.start < keep_to < run.end:
        if run.holders == mirror.bit and run not in mirror.guessed:  # nobody else holds these chunks
            _uncount(table, mirror, keep_to, run.end)
            del run.hashes[keep_to - run.start :]
            return
        table.split(run, keep_to)
    use, above = mirror.last_use.pop(run), run.parent
    _uncount(table, mirror, run.start, run.end)
    if run in mirror.guessed:
        mirror.guessed_bytes += table.size_bytes(run.start, run.end)
        table.guessed_entries += len(run.hashes)
    else:
        disown(table, mirror, run)
    if above is not None and mirror.last_use[above] is use:
        use.leaf = above
    else:  # `above` was used later
        del mirror.uses[use]


def _uncount(table: PrefixTable, mirror: Mirror, start: int, end: int) -> None:
    """Count chunks of the mirror as proven no longer."""
    mirror.used_bytes -= table.size_bytes(start, end)
    mirror.entries -= end - start
    table.entries -= end - start


def disown(table: PrefixTable, mirror: Mirror, run: Run) -> None:
    run.holders &= ~mirror.bit
    if not run.holders:
        del table.index[run.hashes[0]]
        if run.parent is not None:
            run.parent.children -= 1


def _held_below(mirror: Mirror, run: Run) -> list[Run]:
    """Return the proven runs below a run. Each stands before the run that it continues. The function examines
    every proven run of the mirror.
    """
    children: dict[Run, list[Run]] = {}
    for held in mirror.last_use:
        if held.parent is not None:
            children.setdefault(held.parent, []).append(held)
    found = list(children.get(run, ()))
    for below in found:
        found += children.get(below, ())  # the list grows during this loop
    found.reverse()
    return found
