"""Takes entries out of the prefix table: records of requests that did not use them, and chunks that a server
lacks by its own reports. `servers` and `eviction` use the same steps.

A chunk goes only together with all that the same server holds behind it, since a tail without its head is
useless.
"""

from __future__ import annotations

from collections.abc import Sequence

from epp.prefix_index.table import Mirror, PrefixTable, Recorded, Run, Use
from epp.types import ChunkHash, EndpointName


def undo(table: PrefixTable, recorded: Recorded) -> None:
    """Remove the entries that `record` added, unless they were recorded or touched since.
    May be called any number of times.
    """
    mirror, use = recorded.mirror, recorded.use
    if mirror is None or use is None or use.leaf is None or mirror.last_use.get(use.leaf) is not use:
        return
    run: Run | None = use.leaf
    while run is not None and mirror.last_use[run] is use and run.end > recorded.first_added:
        if run.children and _held_below(mirror, run):
            break  # by its own events the server holds chunks after this run
        above = run.parent
        run = _release(table, mirror, run, keep_to=recorded.first_added) or above
    _retreat(mirror, use, run)


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
    """Drop the chunks of a run from `keep_to` on for a server that holds nothing below the run. So the run's
    last use ends there.
    """
    use, above = mirror.last_use[run], run.parent
    kept = _release(table, mirror, run, keep_to=keep_to)
    _retreat(mirror, use, kept or above)


def _release(table: PrefixTable, mirror: Mirror, run: Run, *, keep_to: int) -> Run | None:
    """Let `mirror` drop the chunks of a run from `keep_to` on. The mirror must hold nothing below this run.
    Returns the run that it keeps, if any.
    """
    upper = None
    if run.start < keep_to < run.end:
        if run.holders == mirror.bit:
            _uncount(table, mirror, keep_to, run.end)
            del run.hashes[keep_to - run.start :]
            return run
        upper = table.split(run, keep_to)
    del mirror.last_use[run]
    _uncount(table, mirror, run.start, run.end)
    disown(table, mirror, run)
    return upper


def _uncount(table: PrefixTable, mirror: Mirror, start: int, end: int) -> None:
    mirror.used_bytes -= table.size_bytes(start, end)
    mirror.entries -= end - start
    table.entries -= end - start


def disown(table: PrefixTable, mirror: Mirror, run: Run) -> None:
    run.holders &= ~mirror.bit
    if not run.holders:
        del table.index[run.hashes[0]]
        if run.parent is not None:
            run.parent.children -= 1


def _retreat(mirror: Mirror, use: Use, run: Run | None) -> None:
    """Called when the deepest runs of a use are gone: end it at `run`, unless `run` was used later."""
    if run is not None and mirror.last_use[run] is use:
        use.leaf = run
    else:
        mirror.unlink(use)


def _held_below(mirror: Mirror, run: Run) -> list[Run]:
    """Return the runs that the mirror holds below a run. Each stands before the run that it continues.
    The function examines every run of the mirror.
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
