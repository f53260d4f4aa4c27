"""The prefix table: an approximate mirror of what every server's prefix cache holds.

Owns which chunks are assumed cached where, when they were last used, and how much each server can hold.
Capacity is in bytes of prompt text; callers convert from tokens. An entry is one (server, chunk) pair.

Eviction follows the servers' own order: least recently used first. Chunks that were last used together are
evicted from the tail of their chain, since a head without its tail is still useful, and a tail without its
head is useless. Uses of one server keep the order of the calls that made them. `record` and `charge` never
evict. `evict` does, in bounded portions, at a moment when no request waits. Until then a server may be over
its capacity.

Synchronous, knows no clock: times are monotonic seconds of the caller. Caller: `epp.picker`.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator, Sequence

from epp.prefix_index.forest import Mirror, Run, RunForest, Use, whole_chain
from epp.prefix_index.hashing import ChunkSchedule
from epp.types import ChunkHash, EndpointName, Facts

_ANY = sys.maxsize
"""More chunks than any server holds."""
_MOST_RUNS_AT_ONCE = 8_192
"""Most runs that one call clears, in some 7 ms."""
_RUNS_A_STEP = 4_096
"""Most runs of a larger mirror that one call removes, in some 8 ms."""


class Recorded(Facts, frozen=True):
    """What one `record` did, for `undo`."""

    first_added: int
    """Index of the first chunk that the table did not have before."""
    added: int
    """Number of chunks that the table did not have before. They are the tail of the chain."""
    unused_s: float
    """Time since the last use of the part that the table had before. 0: the table had no part."""
    _mirror: Mirror | None
    _use: Use | None


_NOTHING = Recorded(first_added=0, added=0, unused_s=0.0, _mirror=None, _use=None)


class PrefixTable:
    def __init__(self, *, schedule: ChunkSchedule, max_entries: int, ttl_s: float) -> None:
        self.schedule = schedule
        """How prompts are cut into the chunks of this table's chains. For reading."""
        self._forest = RunForest(schedule=schedule)
        self._mirrors: dict[EndpointName, Mirror] = {}
        self._over: dict[Mirror, None] = {}
        """Mirrors that may be over their capacity, in the order in which they exceeded it."""
        self._emptied: dict[Mirror, None] = {}
        """Large mirrors that were cleared or dropped. `evict` removes their entries step by step. Until then
        they count as empty, and take nothing new."""
        self._hidden = 0
        """The bits of these mirrors."""
        self._now = -math.inf
        self.set_bounds(max_entries=max_entries, ttl_s=ttl_s)

    def set_bounds(self, *, max_entries: int, ttl_s: float) -> None:
        """The new bounds take effect with the next `evict`."""
        if max_entries < 0 or not ttl_s > 0:
            raise ValueError(f"bounds that keep nothing: {max_entries=} {ttl_s=}")
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._expiry_due = -math.inf

    # -- servers ---------------------------------------------------------------------------------------------

    def add_endpoint(self, name: EndpointName, *, capacity_bytes: int) -> None:
        """Start an empty mirror. ValueError if there is one."""
        if name in self._mirrors:
            raise ValueError(f"{name} is in the table already")
        mirror = self._mirrors[name] = Mirror(name=name, capacity_bytes=_capacity(capacity_bytes))
        self._forest.enrol(mirror)

    def drop_endpoint(self, name: EndpointName) -> None:
        mirror = self._mirrors.pop(name)
        self._over.pop(mirror, None)
        self._empty(mirror)

    def clear_endpoint(self, name: EndpointName) -> None:
        """Forget everything that the server held, because it restarted with a cold cache."""
        self._empty(self._mirrors[name])

    def _empty(self, mirror: Mirror) -> None:
        self._emptied[mirror] = None
        self._hidden |= mirror.bit
        if len(mirror.last_use) <= _MOST_RUNS_AT_ONCE:
            self._forest.release_all(mirror)
            self._is_empty(mirror)

    def _is_empty(self, mirror: Mirror) -> None:
        del self._emptied[mirror]
        self._hidden &= ~mirror.bit
        if self._mirrors.get(mirror.name) is not mirror:
            self._forest.strike(mirror)

    def resize(self, name: EndpointName, *, capacity_bytes: int) -> None:
        """The new size takes effect with the next `evict`."""
        mirror = self._mirrors[name]
        mirror.capacity_bytes = _capacity(capacity_bytes)
        self._over[mirror] = None

    def endpoints(self) -> list[EndpointName]:
        return list(self._mirrors)

    def capacity_bytes(self, name: EndpointName) -> int:
        return self._mirrors[name].capacity_bytes

    def used_bytes(self, name: EndpointName) -> int:
        """Return the bytes of chunks and anonymous bytes. They may exceed the capacity until `evict` has
        run.
        """
        return self._mirrors[name].used_bytes

    def entries(self, name: EndpointName) -> int:
        return self._mirrors[name].entries

    def evictions(self) -> dict[EndpointName, int]:
        """Return the entries evicted so far, by server. Entries removed by `undo` or a restart do not
        count.
        """
        return {name: mirror.evicted for name, mirror in self._mirrors.items()}

    def __len__(self) -> int:
        return self._forest.entries

    def uses(self, name: EndpointName) -> Iterator[tuple[Sequence[int], int]]:
        """Calls of `record` and `charge` that would make the server's mirror again, the oldest first: a
        chain, or a number of bytes without a chain.

        The table may change between steps. Entries that are gone by then are left out, and new ones do not
        appear.
        """
        mirror = self._taking(name)
        for use in list(mirror.uses()) if mirror is not None else ():
            if use.leaf is None:
                yield (), use.size_bytes
            elif mirror is not None and mirror.last_use.get(use.leaf) is use:
                yield whole_chain(use.leaf), 0

    # -- prompts ---------------------------------------------------------------------------------------------

    def match(self, chain: Sequence[ChunkHash]) -> dict[EndpointName, int]:
        """Return the number of leading chunks that each server holds. Servers that hold none are left out."""
        return {
            mirror.name: chunks
            for holders, chunks in self.holders(chain)
            for mirror in self._forest.mirrors(holders)
        }

    def holders(self, chain: Sequence[ChunkHash]) -> list[tuple[int, int]]:
        """Return the same as `match`, grouped: a mask of `bits`, and the number of leading chunks that each
        server in the mask holds. The most chunks come first.
        """
        runs, covered = self._forest.path(chain)
        found = []
        shown, deeper = ~self._hidden, 0
        for run in reversed(runs):
            holders = run.holders & shown
            if holders != deeper:
                found.append((holders & ~deeper, covered))
            deeper, covered = holders, run.start
        return found

    def bits(self) -> dict[EndpointName, int]:
        """Return the number of each server's bit in the masks of `holders`. Valid until a server comes or
        goes.
        """
        return {name: mirror.bit.bit_length() - 1 for name, mirror in self._mirrors.items()}

    def _taking(self, name: EndpointName) -> Mirror | None:
        """None: the server has left, or its mirror is still being emptied."""
        mirror = self._mirrors.get(name)
        return None if mirror in self._emptied else mirror

    def record(self, name: EndpointName, chain: Sequence[ChunkHash], *, now: float) -> Recorded:
        """From now on the server is assumed to hold the chain. A server that has left is ignored."""
        mirror = self._taking(name)
        runs = self._forest.whole_path(chain) if mirror is not None else []
        if mirror is None or not runs:
            return _NOTHING
        first_added, last_use = runs[-1].end, None
        for run in reversed(runs):
            last_use = mirror.last_use.get(run)
            if last_use is not None:
                break
            self._forest.hold(mirror, run)
            first_added = run.start
        added = runs[-1].end - first_added
        unused_s = now - last_use.at if last_use is not None else 0.0
        use = self._use(mirror, runs, now=now)
        if mirror.used_bytes > mirror.capacity_bytes:
            self._over[mirror] = None
        return Recorded(first_added=first_added, added=added, unused_s=unused_s, _mirror=mirror, _use=use)

    def touch(self, name: EndpointName, chain: Sequence[ChunkHash], *, now: float) -> None:
        """Renew the part of the chain that the server still holds. A server that has left is ignored."""
        mirror = self._taking(name)
        if mirror is None:
            return
        runs, covered = self._forest.path_of(mirror, chain)
        self._forest.cut(runs, covered)
        if runs:
            self._use(mirror, runs, now=now)

    def undo(self, recorded: Recorded) -> None:
        """Remove the entries that `record` added, unless they were recorded or touched since.
        May be called any number of times.
        """
        mirror, use = recorded._mirror, recorded._use  # noqa: SLF001 - the handle is this module's own
        if mirror is None or use is None or use.leaf is None or mirror.last_use.get(use.leaf) is not use:
            return
        run: Run | None = use.leaf
        while run is not None and mirror.last_use[run] is use and run.end > recorded.first_added:
            if run.children and self._forest.held_below(mirror, run):
                break  # by its own events the server holds chunks after this run
            above = run.parent
            run = self._forest.release(mirror, run, keep_to=recorded.first_added) or above
        self._retreat(mirror, use, run)

    def credit(self, name: EndpointName, chain: Sequence[ChunkHash], *, now: float) -> bool:
        """The server already holds the chain. The chunks that were not known count as its least recently used
        ones.

        True: there were such chunks, and there was room for them. Prompts sent there since then will evict
        them. A server that has left is ignored.
        """
        mirror = self._taking(name)
        if mirror is None or not chain:
            return False
        _, covered = self._forest.path_of(mirror, chain)
        missing_bytes = self.schedule.end_bytes(len(chain)) - self.schedule.end_bytes(covered)
        if not missing_bytes or mirror.used_bytes + missing_bytes > mirror.capacity_bytes:
            return False
        runs = self._forest.whole_path(chain)
        missing = [run for run in runs if run not in mirror.last_use]
        if not missing:
            return False
        oldest = mirror.oldest
        use = Use(at=self._advance(now) if oldest is None else oldest.at, leaf=missing[-1])
        mirror.prepend(use)
        for run in missing:
            self._forest.hold(mirror, run)
            mirror.last_use[run] = use
        self._forest.mend(runs)
        return True

    def forget(self, name: EndpointName, chain: Sequence[ChunkHash], *, keep: int, as_of: float) -> int:
        """The server does not hold chunk `keep` of the chain, nor anything that continues it, unless the
        chunk was used after `as_of`. Returns the number of entries forgotten. A server that has left is
        ignored.
        """
        mirror = self._taking(name)
        runs, covered = self._forest.path(chain[: keep + 1])
        if mirror is None or covered <= keep:
            return 0
        run = runs[-1]
        if run not in mirror.last_use or mirror.last_use[run].at > as_of:
            return 0
        before = mirror.entries
        if run.children:
            for below in self._forest.held_below(mirror, run):
                self._shorten(mirror, below, keep_to=below.start)
        self._shorten(mirror, run, keep_to=keep)
        return before - mirror.entries

    def _shorten(self, mirror: Mirror, run: Run, *, keep_to: int) -> None:
        """The server drops the rest of a run and everything below it, so the run's last use ends there."""
        use, above = mirror.last_use[run], run.parent
        kept = self._forest.release(mirror, run, keep_to=keep_to)
        self._retreat(mirror, use, kept or above)

    def charge(self, name: EndpointName, *, size_bytes: int, now: float) -> None:
        """Bytes in the server's cache whose prompt we do not know. A server that has left is ignored."""
        mirror = self._taking(name)
        if mirror is None or size_bytes <= 0:
            return
        newest = mirror.newest
        if newest is not None and newest.leaf is None:
            # No other use came between, so one use keeps the order,
            # and the mirror of a server that only answers stays small.
            newest.at, newest.size_bytes = self._advance(now), newest.size_bytes + size_bytes
        else:
            mirror.append(Use(at=self._advance(now), leaf=None, size_bytes=size_bytes))
        mirror.used_bytes += size_bytes
        if mirror.used_bytes > mirror.capacity_bytes:
            self._over[mirror] = None

    def _use(self, mirror: Mirror, runs: Sequence[Run], *, now: float) -> Use:
        use = Use(self._advance(now), runs[-1])
        mirror.append(use)
        for run in runs:
            mirror.assign(run, use)
        if len(runs) > 1:
            self._forest.mend(runs)
        return use

    def _advance(self, now: float) -> float:
        """Return the table's time: `now`, but never less than before, so that uses are ordered by time."""
        self._now = max(self._now, now)
        return self._now

    def _retreat(self, mirror: Mirror, use: Use, run: Run | None) -> None:
        """Called when the deepest runs of a use are gone: end it at `run`, unless `run` was used later."""
        if run is not None and mirror.last_use[run] is use:
            use.leaf = run
        else:
            mirror.unlink(use)

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, now: float, *, budget: int = 256) -> int:
        """Bring the table back into its bounds: first age, then each server's capacity, then the total.
        Returns the number of entries evicted.

        `budget` bounds the work: runs and charges removed, about a microsecond each. Call again for the rest.
        """
        now = self._advance(now)
        evicted = 0
        if self._emptied:
            self._empty_further(next(iter(self._emptied)))
        budget, gone = self._expire(now, budget=budget)
        evicted += gone
        while self._over and budget > 0:
            mirror = next(iter(self._over))
            while mirror.used_bytes > mirror.capacity_bytes and budget > 0:
                evicted += self._evict_oldest(mirror, most_bytes=mirror.used_bytes - mirror.capacity_bytes)
                budget -= 1
            if mirror.used_bytes <= mirror.capacity_bytes:
                del self._over[mirror]
        return evicted + self._bound(budget=budget)

    def _empty_further(self, mirror: Mirror) -> None:
        for _ in range(_RUNS_A_STEP):
            use = mirror.oldest
            if use is None:
                self._is_empty(mirror)
                return
            if use.leaf is not None:
                self._shorten(mirror, use.leaf, keep_to=use.leaf.start)
            else:
                mirror.used_bytes -= use.size_bytes
                mirror.unlink(use)

    def _expire(self, now: float, *, budget: int) -> tuple[int, int]:
        """Evict entries that were unused for the TTL. Returns the rest of the budget, and the number of
        entries evicted.
        """
        evicted = 0
        if now < self._expiry_due:
            return budget, evicted
        oldest_at = now
        for mirror in self._mirrors.values():
            while (use := mirror.oldest) is not None and use.at + self._ttl_s <= now:
                if budget <= 0:
                    return budget, evicted
                evicted += self._evict_oldest(mirror)
                budget -= 1
            if use is not None:
                oldest_at = min(oldest_at, use.at)
        self._expiry_due = oldest_at + self._ttl_s
        return budget, evicted

    def _bound(self, *, budget: int) -> int:
        """Evict the oldest entries of all servers until the total is within its bound."""
        excess = len(self) - sum(mirror.entries for mirror in self._emptied) - self._max_entries
        if excess <= 0:
            return 0
        heads = [(m.oldest.at, m.bit, m) for m in self._mirrors.values() if m.oldest is not None]
        heapq.heapify(heads)
        left = excess
        while left > 0 and budget > 0:
            mirror = heads[0][2]
            left -= self._evict_oldest(mirror, most_entries=left)
            budget -= 1
            if mirror.oldest is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (mirror.oldest.at, mirror.bit, mirror))
        return excess - left

    def _evict_oldest(self, mirror: Mirror, *, most_bytes: int = _ANY, most_entries: int = _ANY) -> int:
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
        keep_bytes = self.schedule.end_bytes(run.end) - most_bytes
        keep_to = max(run.start, run.end - most_entries, self.schedule.chunks_in(max(keep_bytes, 0)))
        before = mirror.entries
        self._shorten(mirror, run, keep_to=keep_to)
        freed = before - mirror.entries
        mirror.evicted += freed
        return freed

    # -- checks ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self._forest.check_integrity()
        assert self._hidden == sum(mirror.bit for mirror in self._emptied)
        for mirror in self._over:
            assert self._mirrors.get(mirror.name) is mirror, "a server that left still waits for eviction"
        for mirror in self._mirrors.values():
            assert (
                mirror.used_bytes <= mirror.capacity_bytes or mirror in self._over or mirror in self._emptied
            ), "over its capacity and eviction would not see it"


def _capacity(capacity_bytes: int) -> int:
    if capacity_bytes < 0:
        raise ValueError(f"a cache holds nothing or more: {capacity_bytes=}")
    return capacity_bytes
