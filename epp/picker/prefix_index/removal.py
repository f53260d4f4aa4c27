"""Takes proven entries out of the prefix table: chunks that a server lacks by its own reports. `servers`,
`eviction` and `guesses` use the same steps.

A chunk goes only together with all that is proven behind it, since a tail without its head is useless.
Guesses that cover the chunk keep it.
"""

from __future__ import annotations

from collections.abc import Sequence

from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index.table import Mirror, PrefixTable, Run, Use


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
    """Drop the chunks of a run from `keep_to` on for a server for which nothing below the run is proven. So
    the run's last use ends there.
    """
    use, above = mirror.last_use[run], run.parent
    kept = _release(table, mirror, run, keep_to=keep_to)
    _retreat(mirror, use, kept or above)


def _release(table: PrefixTable, mirror: Mirror, run: Run, *, keep_to: int) -> Run | None:
    """Let the chunks of a run from `keep_to` on be no longer proven for `mirror`, as nothing below this run
    is. Returns the run that stays proven, if any.
    """
    upper, guessed = None, run in mirror.guessed
    if run.start < keep_to < run.end:
        if run.holders == mirror.bit and not guessed:
            _uncount(table, mirror, keep_to, run.end)
            del run.hashes[keep_to - run.start :]
            return run
        upper = table.split(run, keep_to)
    del mirror.last_use[run]
    _uncount(table, mirror, run.start, run.end)
    if guessed:
        mirror.guessed_bytes += table.size_bytes(run.start, run.end)
        table.guessed_entries += len(run.hashes)
    else:
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
