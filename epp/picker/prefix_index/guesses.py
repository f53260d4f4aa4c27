"""Guesses: chains that were sent to a server which has yet to compute them. They match at once, for every
request, and leave without a trace if the server refuses.

All guesses of a server together write at most `GUESSED_SHARE` of its capacity. What does not fit is not
written, so the newest guess is the first to go. A guess renews nothing: `prove` makes the chain the server's
newest use, `drop` leaves all as if the guess had never been made. One of them is called, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index.table import Mirror, PrefixTable, Recorded, Run
from epp.picker.prefix_index.upkeep import disown

GUESSED_SHARE: Final = 0.5
"""Largest part of a server's capacity, and of the table's entries, that guesses may take."""


class GuessedEntries(Struct, frozen=True, eq=False, gc=False):
    """The entries of one guess: the deepest run and its ancestors."""

    mirror: Mirror
    counts: dict[Run, int]
    """The mirror's `guessed` at that time. If the mirror has another one now, this guess is void."""
    leaf: Run


def guess(table: PrefixTable, name: EndpointName, chain: Sequence[ChunkHash]) -> GuessedEntries | None:
    """Assume that the server will hold the chain, or the part of it for which there is room. None: nothing is
    written, since the server has left, has no room, or has a cache that is smaller than the chain.
    """
    mirror = table.taking(name)
    if mirror is None or table.size_bytes(0, len(chain)) > mirror.capacity_bytes:
        return None
    most = _most_chunks(table, mirror, chain)
    runs = table.whole_path(chain if most == len(chain) else chain[:most])
    if not runs:
        return None
    counts = mirror.guessed
    for run in runs:
        known = counts.get(run, 0)
        counts[run] = known + 1
        if not known and run not in mirror.last_use:
            table.own(mirror, run)
            mirror.guessed_bytes += table.size_bytes(run.start, run.end)
            table.guessed_entries += len(run.hashes)
    return GuessedEntries(mirror, counts, runs[-1])


def prove(
    table: PrefixTable,
    name: EndpointName,
    chain: Sequence[ChunkHash],
    guess: GuessedEntries | None,
    *,
    now: float,
) -> Recorded:
    """Record the chain of a guess: its server has computed it."""
    recorded = table.record(name, chain, now=now)
    drop(table, guess)
    return recorded


def drop(table: PrefixTable, guess: GuessedEntries | None) -> None:
    """Remove what is only held for this guess."""
    if guess is None or guess.mirror.guessed is not guess.counts:
        return
    mirror, counts = guess.mirror, guess.counts
    run: Run | None = guess.leaf
    left: list[Run] = []
    while run is not None:
        above = run.parent
        if counts[run] > 1:
            counts[run] -= 1
            left.append(run)
        else:
            del counts[run]
            if run in mirror.last_use:
                left.append(run)
            else:
                mirror.guessed_bytes -= table.size_bytes(run.start, run.end)
                table.guessed_entries -= len(run.hashes)
                disown(table, mirror, run)
        run = above
    table.mend(left[::-1])


def _most_chunks(table: PrefixTable, mirror: Mirror, chain: Sequence[ChunkHash]) -> int:
    """Return how many chunks of the chain may be written: those that the mirror holds, and those for which
    there is room.
    """
    room_bytes = int(GUESSED_SHARE * mirror.capacity_bytes) - mirror.guessed_bytes
    room = int(GUESSED_SHARE * table.max_entries) - table.guessed_entries
    if table.size_bytes(0, len(chain)) <= room_bytes and len(chain) <= room:
        return len(chain)
    runs, covered = table.path(chain)
    while runs and not runs[-1].holders & mirror.bit:
        covered = runs.pop().start
    by_bytes = table.schedule.chunks_in(table.schedule.end_bytes(covered) + max(0, room_bytes))
    return min(len(chain), by_bytes, covered + max(0, room))
