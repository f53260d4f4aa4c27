"""The prefix table as a forest of runs, with its parts: runs of chunks, uses of chains, and a mirror for each
server.

A run is a span of consecutive chunks that all have the same holders, so a long prompt is a few objects,
however many chunks it has. Runs are split where chains diverge or where their holders differ. A use is one
moment at which a server worked on a chain. All runs of the chain then point to this use, and later uses take
over the shared runs. So the runs that still point to a use are the tail of its chain, which ends in
`Use.leaf`. Therefore a touch costs one step for each run, and eviction starts at the tail without any order
among runs.

`RunForest` owns the runs, the index from a run's first hash to the run, and who holds which run. It knows
nothing of capacity, time or eviction order. Invariants: a hash names a whole prefix, so a run is found by its
first hash alone; a mirror that holds a run holds the run's ancestors; a run without holders does not exist.
Hashes are not cryptographic, and clients choose prompts. So equal hashes of different prefixes may cost
matches, but must never break an invariant: a run is part of a chain only if its parent is the run before it,
and a split or a new run that would use an index key twice is refused.

Caller: `epp.prefix_index.table`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from epp.prefix_index.hashing import ChunkSchedule
from epp.types import ChunkHash, EndpointName


class Run:
    """Chunks `start` to `end` (half open) of the chain that the last hash names."""

    __slots__ = ("children", "hashes", "holders", "parent", "start")

    def __init__(
        self, hashes: array[int], start: int, parent: Run | None, holders: int = 0, children: int = 0
    ) -> None:
        self.hashes = hashes
        """Unsigned 64-bit, never empty."""
        self.start = start
        self.parent = parent
        """The run that ends where this run starts. None: this run is the first of a chain."""
        self.holders = holders
        """Bit mask of the mirrors that hold it; a subset of the parent's holders."""
        self.children = children

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


class Use:
    """One moment at which a server worked on a whole chain, or at which bytes of unknown content were written
    to its cache.
    """

    __slots__ = ("at", "leaf", "newer", "older", "size_bytes")

    def __init__(self, at: float, leaf: Run | None, size_bytes: int = 0) -> None:
        self.at = at
        self.leaf = leaf
        """The deepest run of the chain. None: bytes of unknown content."""
        self.size_bytes = size_bytes
        """Size of the bytes of unknown content. The size of a chain follows from its runs."""
        self.older: Use | None = None
        self.newer: Use | None = None


@dataclass(slots=True, eq=False)
class Mirror:
    """What one server's cache is assumed to hold, its uses in a linked list from oldest to newest."""

    name: EndpointName
    capacity_bytes: int
    bit: int = 0
    """The mirror's bit in `Run.holders`. The forest assigns it."""
    used_bytes: int = 0
    entries: int = 0
    """Number of chunks that the mirror holds."""
    evicted: int = 0
    """Number of chunks evicted so far."""
    last_use: dict[Run, Use] = field(default_factory=dict)
    """The last use of every run that the mirror holds."""
    oldest: Use | None = None
    newest: Use | None = None

    def append(self, use: Use) -> None:
        use.older = self.newest
        if self.newest is None:
            self.oldest = use
        else:
            self.newest.newer = use
        self.newest = use

    def prepend(self, use: Use) -> None:
        use.newer = self.oldest
        if self.oldest is None:
            self.newest = use
        else:
            self.oldest.older = use
        self.oldest = use

    def unlink(self, use: Use) -> None:
        """Remove `use`: no run points to it any more, or its bytes are gone."""
        if use.older is None:
            self.oldest = use.newer
        else:
            use.older.newer = use.newer
        if use.newer is None:
            self.newest = use.older
        else:
            use.newer.older = use.older
        use.older = use.newer = None

    def assign(self, run: Run, use: Use) -> None:
        """Record that `use` was the last use of `run`. A use that has lost its deepest run has lost all its
        runs.
        """
        before = self.last_use.get(run)
        self.last_use[run] = use
        if before is not None and before.leaf is run:
            self.unlink(before)

    def uses(self) -> Iterator[Use]:
        use = self.oldest
        while use is not None:
            yield use
            use = use.newer

    def clear(self) -> None:
        """Forget everything, and break the linked list, so that the garbage collector for
        cycles has no work.
        """
        while self.oldest is not None:
            self.unlink(self.oldest)
        self.last_use.clear()
        self.used_bytes = self.entries = 0


def whole_chain(run: Run) -> array[int]:
    """Return the hashes from the chain's first chunk to the run's last."""
    parts, above = [run.hashes], run.parent
    while above is not None:
        parts.append(above.hashes)
        above = above.parent
    whole = array("Q")
    for part in reversed(parts):
        whole += part
    return whole


class RunForest:
    def __init__(self, *, schedule: ChunkSchedule) -> None:
        self._schedule = schedule
        self._index: dict[int, Run] = {}
        self._mirrors: list[Mirror | None] = []
        self.entries = 0
        """Number of entries of all mirrors together."""

    def enrol(self, mirror: Mirror) -> None:
        """Give the mirror the lowest free bit of `Run.holders`."""
        if None not in self._mirrors:
            self._mirrors.append(None)
        slot = self._mirrors.index(None)
        self._mirrors[slot], mirror.bit = mirror, 1 << slot

    def strike(self, mirror: Mirror) -> None:
        """Remove a mirror that holds nothing any more."""
        assert not mirror.last_use, "release its runs first"
        self._mirrors[mirror.bit.bit_length() - 1] = None

    def mirrors(self, holders: int) -> Iterator[Mirror]:
        while holders:
            slot = holders.bit_length() - 1
            mirror = self._mirrors[slot]
            assert mirror is not None
            yield mirror
            holders ^= 1 << slot

    def path(self, chain: Sequence[ChunkHash]) -> tuple[list[Run], int]:
        """Return the runs along the chain, and the number of chunks that they share with it. Only the last
        run may be shared in part.
        """
        runs: list[Run] = []
        find, parent = self._index.get, None
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
        """Return the same as `path`, as far as `mirror` holds the runs."""
        runs, covered = self.path(chain)
        while runs and runs[-1] not in mirror.last_use:
            covered = runs.pop().start
        return runs, covered

    def whole_path(self, chain: Sequence[ChunkHash]) -> list[Run]:
        """Return the path as whole runs, with a new one for the rest of the chain, unless its key is in
        use.
        """
        runs, covered = self.path(chain)
        if self.cut(runs, covered) == covered:
            self.grow(runs, chain, covered)
        return runs

    def cut(self, runs: list[Run], covered: int) -> int:
        """Split the last run of a path where the path leaves it. Returns the chunks covered, which are fewer
        if the split was refused.
        """
        if not runs or covered == runs[-1].end:
            return covered
        upper = self._split(runs.pop(), covered)
        if upper is None:
            return runs[-1].end if runs else 0
        runs.append(upper)
        return covered

    def grow(self, runs: list[Run], chain: Sequence[ChunkHash], covered: int) -> None:
        """Add the rest of the chain to a path of whole runs, as one run. The new run has no holder yet."""
        if covered == len(chain) or chain[covered] in self._index:
            return
        parent = runs[-1] if runs else None
        run = Run(array("Q", chain[covered:]), covered, parent)
        if parent is not None:
            parent.children += 1
        self._index[chain[covered]] = run
        runs.append(run)

    def hold(self, mirror: Mirror, run: Run) -> None:
        """Record that `mirror` holds `run`. The mirror holds the run's parent already."""
        # All runs with a single holder share the mirror's own integer object.
        run.holders = run.holders | mirror.bit if run.holders else mirror.bit
        mirror.entries += len(run.hashes)
        self.entries += len(run.hashes)
        mirror.used_bytes += self._size_bytes(run.start, run.end)

    def release(self, mirror: Mirror, run: Run, *, keep_to: int) -> Run | None:
        """`mirror` drops the chunks of a run from `keep_to` on. It must hold nothing below this run. Returns
        the run that it keeps, if any.
        """
        if run.start < keep_to < run.end:
            if run.holders == mirror.bit:
                mirror.used_bytes -= self._size_bytes(keep_to, run.end)
                mirror.entries -= run.end - keep_to
                self.entries -= run.end - keep_to
                del run.hashes[keep_to - run.start :]
                return run
            upper = self._split(run, keep_to)
        else:
            upper = None
        del mirror.last_use[run]
        mirror.used_bytes -= self._size_bytes(run.start, run.end)
        mirror.entries -= len(run.hashes)
        self.entries -= len(run.hashes)
        self._disown(mirror, run)
        return upper

    def release_all(self, mirror: Mirror) -> None:
        for run in mirror.last_use:
            self._disown(mirror, run)
        self.entries -= mirror.entries
        mirror.clear()

    def held_below(self, mirror: Mirror, run: Run) -> list[Run]:
        """Return the runs that the mirror holds below a run. Each stands before the run that it continues.
        The method examines every run of the mirror.
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

    def mend(self, runs: Sequence[Run]) -> None:
        """Join neighbouring runs of a path that no longer differ, so that old splits do not accumulate."""
        for upper, lower in pairwise(runs):
            if upper.children == 1 and upper.holders == lower.holders and self._used_alike(upper, lower):
                self._absorb(upper, lower)

    def _disown(self, mirror: Mirror, run: Run) -> None:
        run.holders &= ~mirror.bit
        if not run.holders:
            del self._index[run.hashes[0]]
            if run.parent is not None:
                run.parent.children -= 1

    def _split(self, run: Run, at: int) -> Run | None:
        """Split a run before chunk `at`. The upper part is a new run. The lower part stays `run`, so that
        uses still end there.
        """
        key = run.hashes[at - run.start]
        if key in self._index:
            return None
        upper = Run(run.hashes[: at - run.start], run.start, run.parent, run.holders, children=1)
        self._index[upper.hashes[0]] = upper
        self._index[key] = run
        run.hashes = run.hashes[at - run.start :]
        run.start, run.parent = at, upper
        for mirror in self.mirrors(run.holders):
            mirror.last_use[upper] = mirror.last_use[run]
        return upper

    def _absorb(self, upper: Run, lower: Run) -> None:
        """Undo a split: `lower` takes the chunks of its parent."""
        del self._index[lower.hashes[0]]
        self._index[upper.hashes[0]] = lower
        lower.hashes = upper.hashes + lower.hashes
        lower.start, lower.parent = upper.start, upper.parent
        for mirror in self.mirrors(lower.holders):
            del mirror.last_use[upper]

    def _used_alike(self, upper: Run, lower: Run) -> bool:
        return all(m.last_use[upper] is m.last_use[lower] for m in self.mirrors(upper.holders))

    def _size_bytes(self, start: int, end: int) -> int:
        return self._schedule.end_bytes(end) - self._schedule.end_bytes(start)

    def check_integrity(self) -> None:
        """Assert every invariant of the runs, without trusting any index."""
        assert self.entries == sum(m.entries for m in self._mirrors if m is not None), "entries miscounted"
        children: dict[Run, int] = {}
        held: dict[Run, int] = {}
        for slot, mirror in enumerate(self._mirrors):
            if mirror is not None:
                assert mirror.bit == 1 << slot, "a mirror in another's place"
                for run in mirror.last_use:
                    held[run] = held.get(run, 0) | mirror.bit
        assert set(held) == set(self._index.values()), "a run that nobody holds, or one that is not indexed"
        for key, run in self._index.items():
            assert run.hashes, "an empty run"
            assert run.hashes[0] == key, "a run under another run's key"
            assert run.holders == held[run], "mask and mirrors disagree"
            if run.parent is None:
                assert run.start == 0, "an orphan"
                continue
            assert self._index.get(run.parent.hashes[0]) is run.parent, "the parent is gone"
            assert run.start == run.parent.end, "a gap between run and parent"
            assert run.holders & ~run.parent.holders == 0, "held without its prefix"
            children[run.parent] = children.get(run.parent, 0) + 1
        for run in self._index.values():
            assert run.children == children.get(run, 0), "children miscounted"
        for mirror in self._mirrors:
            if mirror is not None:
                assert mirror.entries == sum(len(run.hashes) for run in mirror.last_use)
                self._check_uses(mirror)

    def _check_uses(self, mirror: Mirror) -> None:
        uses = list(mirror.uses())
        assert mirror.newest is (uses[-1] if uses else None)
        assert all(a.newer is b and b.older is a and a.at <= b.at for a, b in pairwise(uses))
        order = {use: n for n, use in enumerate(uses)}
        reached = set()
        for use in uses:
            assert (use.leaf is None) == (use.size_bytes > 0)
            run = use.leaf
            while run is not None and mirror.last_use[run] is use:
                reached.add(run)
                run = run.parent
        assert reached == set(mirror.last_use), "an entry that no use leads to would never be evicted"
        used_bytes = sum(use.size_bytes for use in uses)
        for run, use in mirror.last_use.items():
            used_bytes += self._size_bytes(run.start, run.end)
            if run.parent is not None:
                assert order[mirror.last_use[run.parent]] >= order[use], "a prefix would go before its tail"
        assert used_bytes == mirror.used_bytes, "bytes miscounted"

    def __len__(self) -> int:
        return len(self._index)


def _shared(hashes: array[int], chain: Sequence[ChunkHash], at: int) -> int:
    """Return how many chunks from `at` on a run shares with the chain. The first one is known to be
    shared; bisection finds the last.
    """
    low, high = 1, min(len(hashes), len(chain) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == chain[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
