"""The invariants of the prefix table (`epp/picker/prefix_index`)."""

from itertools import pairwise

from epp.picker.prefix_index.table import Mirror, PrefixTable, Run


def check_table(table: PrefixTable) -> None:
    """Assert every invariant of the table, without trusting any index."""
    mirrors = [mirror for mirror in table.by_bit if mirror is not None]
    assert sorted(table.free_bits) == [n for n, mirror in enumerate(table.by_bit) if mirror is None]
    assert table.entries == sum(m.entries for m in mirrors), "entries miscounted"
    _check_runs(table)
    only_guessed = 0
    for each in mirrors:
        assert each.entries == sum(len(run.hashes) for run in each.last_use), "entries of a mirror miscounted"
        _check_uses(table, each)
        only_guessed += _check_guesses(table, each)
    assert only_guessed == table.guessed_entries, "guessed entries miscounted"
    for mirror in table.over:
        assert table.mirrors.get(mirror.name) is mirror, "a server that left still waits for eviction"
    for mirror in table.mirrors.values():
        assert (
            mirror.used_bytes <= mirror.capacity_bytes or mirror in table.over or mirror in table.emptied
        ), "over its capacity and eviction would not see it"


def _check_runs(table: PrefixTable) -> None:
    children: dict[Run, int] = {}
    held: dict[Run, int] = {}
    for slot, mirror in enumerate(table.by_bit):
        if mirror is not None:
            assert mirror.bit == 1 << slot, "a mirror in another's place"
            for run in mirror.last_use.keys() | mirror.guessed.keys():
                held[run] = held.get(run, 0) | mirror.bit
    assert set(held) == set(table.index.values()), "a run that nobody holds, or one that is not indexed"
    for key, run in table.index.items():
        assert run.hashes, "an empty run"
        assert run.hashes[0] == key, "a run under another run's key"
        assert run.holders == held[run], "mask and mirrors disagree"
        if run.parent is None:
            assert run.start == 0, "an orphan"
            continue
        assert table.index.get(run.parent.hashes[0]) is run.parent, "the parent is gone"
        assert run.start == run.parent.end, "a gap between run and parent"
        assert run.holders & ~run.parent.holders == 0, "held without its prefix"
        children[run.parent] = children.get(run.parent, 0) + 1
    for run in table.index.values():
        assert run.children == children.get(run, 0), "children miscounted"


def _check_uses(table: PrefixTable, mirror: Mirror) -> None:
    uses = list(mirror.uses)
    assert all(a.at <= b.at for a, b in pairwise(uses)), "uses in disorder"
    order = {use: n for n, use in enumerate(uses)}
    reached = set()
    for use in uses:
        run: Run | None = use.leaf
        assert mirror.last_use.get(use.leaf) is use, "a use that has lost all its runs"
        while run is not None and mirror.last_use[run] is use:
            reached.add(run)
            run = run.parent
    assert reached == set(mirror.last_use), "an entry that no use leads to would never be evicted"
    used_bytes = 0
    for run, use in mirror.last_use.items():
        used_bytes += table.size_bytes(run.start, run.end)
        if run.parent is not None:
            assert order[mirror.last_use[run.parent]] >= order[use], "a prefix would go before its tail"
    assert used_bytes == mirror.used_bytes, "bytes miscounted"


def _check_guesses(table: PrefixTable, mirror: Mirror) -> int:
    """Return the number of the mirror's entries that are only guessed."""
    for run, count in mirror.guessed.items():
        assert count > 0, "a guess that nobody made"
        if run.parent is not None:
            assert mirror.guessed.get(run.parent, 0) >= count, "a guess without its prefix"
    only = [run for run in mirror.guessed if run not in mirror.last_use]
    assert mirror.guessed_bytes == sum(table.size_bytes(r.start, r.end) for r in only), "bytes miscounted"
    assert mirror not in table.emptied or not mirror.guessed, "a server that is being emptied takes guesses"
    return sum(len(run.hashes) for run in only)
