"""The prefix table: an approximate mirror of what every server's prefix cache holds.

Owns which chunks are assumed cached where, when they were last used, and how much each server can hold.
Capacity is in bytes of prompt text; callers convert from tokens. An entry is one (server, chunk) pair. This
module has what requests need: they look up who holds their chain, record the chain, and renew it. Servers
come and go, and entries leave, by `upkeep`. The servers' own reports correct the table (`reported`). Chains
that a server has yet to compute are written by `picker.guesses`. These modules share the table's attributes.

A run is a span of consecutive chunks that all have the same holders, so a long prompt is a few objects,
however many chunks it has. Runs are split where chains diverge or where their holders differ. A use is one
moment at which a server worked on a chain. All runs of the chain then point to this use, and later uses take
over the shared runs. So the runs that still point to a use are the tail of its chain, which ends in
`Use.leaf`. Therefore a touch costs one step for each run, and eviction starts at the tail without any order
among runs. Uses of one server keep the order of the calls that made them.

A mirror holds a run for one or both of two reasons. Either the run is proven: the server has computed it, and
`last_use` has its last use. Or open guesses cover it, and `guessed` has their number. Both reasons match.
Only proven runs have an order, count as the content of the cache, and are evicted. So a guess cannot push out
what is proven. A proven run that is evicted while guesses cover it stays as long as they do.

Invariants: a hash names a whole prefix, so a run is found by its first hash alone; a mirror for which a run
is proven or guessed has the run's ancestors in the same way; a run without holders does not exist; runs that
are only guessed take at most a share of a mirror's capacity when they are written. Hashes are not
cryptographic, and clients choose prompts. So equal hashes of different prefixes may cost matches, but must
never break an invariant: a run is part of a chain only if its parent is the run before it, and a split or a
new run that would use an index key twice is refused.

All code here is synchronous. Times are monotonic seconds of the caller. Callers: the picker and its parts,
`sharing` and `misses`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import Struct

from epp.base.types import ChunkHash, EndpointName
from epp.config.policy import Chunks

# -- where chunks end ----------------------------------------------------------------------------------------


def chunks_in(schedule: Chunks, n_bytes: int) -> int:
    """Return the number of full chunks in a prompt's first `n_bytes`."""
    early = schedule.early
    later_bytes = n_bytes - early * schedule.size_bytes
    if later_bytes < 0:
        return n_bytes // schedule.size_bytes
    return early + later_bytes // schedule.later_size_bytes


def end_bytes(schedule: Chunks, k: int) -> int:
    """Return the number of bytes in the first `k` chunks."""
    early = schedule.early
    if k <= early:
        return k * schedule.size_bytes
    return early * schedule.size_bytes + (k - early) * schedule.later_size_bytes


# -- what the table keeps ------------------------------------------------------------------------------------


class Run(Struct, eq=False):  # with gc=False, the end of a long chain of runs would overflow the C stack
    """Chunks `start` to `end` (half open) of the chain that the last hash names."""

    hashes: array[int]
    """Unsigned 64-bit, never empty."""
    start: int
    parent: Run | None
    """The run that ends where this run starts. None: this run is the first of a chain."""
    holders: int = 0
    """Bit mask of the mirrors that hold the run; a subset of the parent's holders."""
    children: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


class Use(Struct, eq=False, gc=False):
    """One moment at which a server worked on a whole chain."""

    at: float
    leaf: Run
    """The deepest run of the chain."""


@dataclass(slots=True, eq=False)
class Mirror:
    """What one server's cache is assumed to hold."""

    name: EndpointName
    capacity_bytes: int
    bit: int
    """The mirror's bit in `Run.holders`."""
    used_bytes: int = 0
    """Bytes of proven chunks. They may exceed the capacity until `evict` has run."""
    entries: int = 0
    """Number of proven chunks."""
    evicted: int = 0
    """Number of chunks evicted so far. Chunks removed by a restart do not count."""
    last_use: dict[Run, Use] = field(default_factory=dict)
    """The last use of every proven run."""
    guessed: dict[Run, int] = field(default_factory=dict)
    """The number of open guesses that cover a run. A new dict replaces this one if all guesses are void."""
    guessed_bytes: int = 0
    """Bytes of runs that are only guessed."""
    uses: OrderedDict[Use, None] = field(default_factory=OrderedDict)
    """The uses, the oldest first. A use leaves when no run points to it any more."""

    @property
    def oldest(self) -> Use | None:
        return next(iter(self.uses), None)


class PrefixTable:
    def __init__(self, *, schedule: Chunks, max_entries: int) -> None:
        self.schedule = schedule
        """How prompts are cut into the chunks of this table's chains."""
        self.mirrors: dict[EndpointName, Mirror] = {}
        """One for each server. For reading; only the modules of this folder change a mirror."""
        self.by_bit: list[Mirror | None] = []
        """The mirrors at the positions of their bits, with those that are still being emptied."""
        self.free_bits: list[int] = []
        """A heap of the positions without a mirror."""
        self.index: dict[int, Run] = {}
        """Every run, by its first hash."""
        self.max_entries = max_entries
        """The most proven entries. Another bound takes effect with the next `evict`."""
        self.entries = 0
        """Number of proven entries of all mirrors together."""
        self.guessed_entries = 0
        """Number of entries that are only guessed."""
        self.over: dict[Mirror, None] = {}
        """Mirrors that may be over their capacity, in the order in which they exceeded it."""
        self.emptied: dict[Mirror, None] = {}
        """Large mirrors that were cleared or dropped. `evict` removes their entries step by step. Until then
        they count as empty, and take nothing new."""
        self._now = -math.inf

    def taking(self, name: EndpointName) -> Mirror | None:
        """Return the server's mirror. None: the server has left, or its mirror is still being emptied."""
        mirror = self.mirrors.get(name)
        return None if mirror in self.emptied else mirror

    # -- prompts ---------------------------------------------------------------------------------------------

    def match(self, chain: Sequence[ChunkHash]) -> dict[EndpointName, int]:
        """Return the number of leading chunks that each server holds. Servers that hold none are left out."""
        return {
            mirror.name: chunks
            for holders, chunks in self.holders(chain)
            for mirror in self._mirrors_of(holders)
        }

    def holders(self, chain: Sequence[ChunkHash]) -> list[tuple[int, int]]:
        """Return the same as `match`, grouped: a mask of mirrors' bits, and the number of leading chunks that
        each server in the mask holds. The most chunks come first.
        """
        runs, covered = self.path(chain)
        found = []
        hidden = deeper = 0
        for mirror in self.emptied:
            hidden |= mirror.bit
        for run in reversed(runs):
            holders = run.holders & ~hidden
            if holders != deeper:
                found.append((holders & ~deeper, covered))
            deeper, covered = holders, run.start
        return found

    def record(self, name: EndpointName, chain: Sequence[ChunkHash], *, now: float) -> int | None:
        """Assume from now on that the server holds the chain: it has computed it. Return the number of
        leading chunks that were proven before. None: nothing is recorded, as for a server that has left.
        """
        mirror = self.taking(name)
        runs = self.whole_path(chain) if mirror is not None else []
        if mirror is None or not runs:
            return None
        held = runs[-1].end
        for run in reversed(runs):
            if run in mirror.last_use:
                break
            self.hold(mirror, run)
            held = run.start
        self._use(mirror, runs, now=now)
        if mirror.used_bytes > mirror.capacity_bytes:
            self.over[mirror] = None
        return held

    def touch(self, name: EndpointName, chain: Sequence[ChunkHash], *, now: float) -> None:
        """Renew the part of the chain that is still proven. A server that has left is ignored."""
        mirror = self.taking(name)
        if mirror is None:
            return
        runs, covered = self.path_of(mirror, chain)
        self._cut(runs, covered)
        if runs:
            self._use(mirror, runs, now=now)

    @property
    def overdue(self) -> bool:
        """Whether `evict` has something to do."""
        return bool(self.over or self.emptied) or self.entries > self.max_entries

    # -- runs ------------------------------------------------------------------------------------------------

    def path(self, chain: Sequence[ChunkHash]) -> tuple[list[Run], int]:
        """Return the runs along the chain, and the number of chunks that they share with it. Only the last
        run may be shared in part.
        """
        runs: list[Run] = []
        find, parent = self.index.get, None
        at, n = 0, len(chain)
        while at < n:
            run = find(chain[at])
            if run is None or run.parent is not parent:
                break
            runs.append(run)
            hashes = run.hashes
            end = at + len(hashes)
            if end > n or chain[end - 1] != hashes[-1]:
                at += _shared(hashes, chain, at)
                break
            at, parent = end, run
        return runs, at

    def path_of(self, mirror: Mirror, chain: Sequence[ChunkHash]) -> tuple[list[Run], int]:
        """Return the same as `path`, as far as the runs are proven for `mirror`."""
        runs, covered = self.path(chain)
        while runs and runs[-1] not in mirror.last_use:
            covered = runs.pop().start
        return runs, covered

    def whole_path(self, chain: Sequence[ChunkHash]) -> list[Run]:
        """Return the path as whole runs, with a new one for the rest of the chain, unless its key is in
        use. The new run has no holder yet.
        """
        runs, covered = self.path(chain)
        if self._cut(runs, covered) == covered < len(chain) and chain[covered] not in self.index:
            parent = runs[-1] if runs else None
            run = self.index[chain[covered]] = Run(array("Q", chain[covered:]), covered, parent)
            if parent is not None:
                parent.children += 1
            runs.append(run)
        return runs

    def hold(self, mirror: Mirror, run: Run) -> None:
        """Record that `run` is proven for `mirror`, as the run's parent is."""
        size_bytes = self.size_bytes(run.start, run.end)
        if run in mirror.guessed:
            mirror.guessed_bytes -= size_bytes
            self.guessed_entries -= len(run.hashes)
        else:
            self.own(mirror, run)
        mirror.entries += len(run.hashes)
        self.entries += len(run.hashes)
        mirror.used_bytes += size_bytes

    def own(self, mirror: Mirror, run: Run) -> None:
        """Count the mirror among the run's holders."""
        # All runs with a single holder share the mirror's own integer object.
        run.holders = run.holders | mirror.bit if run.holders else mirror.bit

    def split(self, run: Run, at: int) -> Run | None:
        """Split a run before chunk `at`. The upper part is a new run. The lower part stays `run`, so that
        uses still end there. None: the split is refused.
        """
        key = run.hashes[at - run.start]
        if key in self.index:
            return None
        upper = Run(run.hashes[: at - run.start], run.start, run.parent, run.holders, children=1)
        self.index[upper.hashes[0]] = upper
        self.index[key] = run
        run.hashes = run.hashes[at - run.start :]
        run.start, run.parent = at, upper
        for mirror in self._mirrors_of(run.holders):
            if run in mirror.last_use:
                mirror.last_use[upper] = mirror.last_use[run]
            if run in mirror.guessed:
                mirror.guessed[upper] = mirror.guessed[run]
        return upper

    def mend(self, runs: Sequence[Run]) -> None:
        """Join neighbouring runs of a path that no longer differ, so that old splits do not accumulate."""
        for upper, lower in pairwise(runs):
            if upper.children == 1 and upper.holders == lower.holders and self._used_alike(upper, lower):
                del self.index[lower.hashes[0]]
                self.index[upper.hashes[0]] = lower
                lower.hashes = upper.hashes + lower.hashes
                lower.start, lower.parent = upper.start, upper.parent
                for mirror in self._mirrors_of(lower.holders):
                    mirror.last_use.pop(upper, None)
                    mirror.guessed.pop(upper, None)

    def size_bytes(self, start: int, end: int) -> int:
        return end_bytes(self.schedule, end) - end_bytes(self.schedule, start)

    def advance(self, now: float) -> float:
        """Return the table's time: `now`, but never less than before, so that uses are ordered by time."""
        self._now = max(self._now, now)
        return self._now

    def _use(self, mirror: Mirror, runs: Sequence[Run], *, now: float) -> None:
        use = Use(self.advance(now), runs[-1])
        mirror.uses[use] = None
        for run in runs:
            before = mirror.last_use.get(run)
            mirror.last_use[run] = use
            if before is not None and before.leaf is run:
                del mirror.uses[before]  # a use that has lost its deepest run has lost all its runs
        if len(runs) > 1:
            self.mend(runs)

    def _cut(self, runs: list[Run], covered: int) -> int:
        """Split the last run of a path where the path leaves it. Returns the chunks covered, which are fewer
        if the split was refused.
        """
        if not runs or covered == runs[-1].end:
            return covered
        upper = self.split(runs.pop(), covered)
        if upper is None:
            return runs[-1].end if runs else 0
        runs.append(upper)
        return covered

    def _used_alike(self, upper: Run, lower: Run) -> bool:
        # No guess ends between two runs that the same number of guesses covers.
        return all(
            m.last_use.get(upper) is m.last_use.get(lower) and m.guessed.get(upper) == m.guessed.get(lower)
            for m in self._mirrors_of(upper.holders)
        )

    def _mirrors_of(self, holders: int) -> Iterator[Mirror]:
        while holders:
            slot = holders.bit_length() - 1
            mirror = self.by_bit[slot]
            assert mirror is not None
            yield mirror
            holders ^= 1 << slot


def _shared(hashes: array[int], chain: Sequence[ChunkHash], at: int) -> int:
    """Return how many chunks from `at` on a run shares with the chain. The first one is known to be shared,
    and none is shared behind one that differs.
    """
    chunks = range(min(len(hashes), len(chain) - at))
    return bisect_left(chunks, True, lo=1, key=lambda n: hashes[n] != chain[at + n])
