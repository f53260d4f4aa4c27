"""The waiting requests at other pickers of the same servers, by their last reports. Bounds and shares apply
to the whole pool.

Every picker has a queue of its own. For each tenant of each priority it tells the others two things: what
waits there now, and how many tokens it let go since its last report. `control` counts the first in its bounds
and charges the second to the tenant, as if it had let the requests go itself.

Invariants: `in_all`, `by_priority` and `by_tenant` are the sums over `_by_picker`;
a picker has at most `_MOST_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from epp.flow.queues import NOTHING, BandKey, Load
from epp.flow.settings import LONGEST_DELAY_S

_MOST_ROWS = 4096
"""Tenants of priorities of one other picker; what it tells beyond them is not counted."""
FlowKey = tuple[int, str, bool]
"""Priority, tenant, and whether demoted."""
_NONE = (0, 0, 0)


class Row(NamedTuple):
    """One tenant's requests of one priority at one picker: those in time, or those demoted."""

    priority: int
    tenant: str
    late: bool
    let_go_tokens: int
    """Tokens let go since the last row about this tenant."""
    requests: int
    """That wait now; `size_bytes` and `tokens` likewise."""
    size_bytes: int
    tokens: int


class Telling:
    """What other pickers know of what waits here, so that they are told of changes alone."""

    def __init__(self) -> None:
        self._told: dict[FlowKey, tuple[int, int, int]] = {}

    def rows(
        self, waiting: Mapping[FlowKey, Load], charges: Mapping[FlowKey, int], *, anew: bool
    ) -> Sequence[Row]:
        """The rows that other pickers do not know yet. charges: tokens let go since the last call;
        anew: the other pickers know nothing.
        """
        told = {} if anew else self._told
        now = self._told = {key: load.as_tuple() for key, load in waiting.items()}
        changed = {key for key in told.keys() | now.keys() if told.get(key) != now.get(key)}
        return [Row(*key, charges.get(key, 0), *now.get(key, _NONE)) for key in changed | charges.keys()]


class Elsewhere:
    def __init__(self) -> None:
        self._by_picker: dict[bytes, dict[FlowKey, Load]] = {}
        self._tokens: dict[BandKey, dict[bytes, int]] = {}
        """That wait, by band and picker."""
        self._since: dict[tuple[bytes, BandKey], float] = {}
        """Since when something waits in the band at the picker, as far as was heard."""
        self._went: dict[bytes, dict[BandKey, float]] = {}
        """When the picker last let something go, by band."""
        self.in_all = Load()
        self.by_priority: dict[int, Load] = {}
        self.by_tenant: dict[tuple[int, str], Load] = {}

    @property
    def pickers(self) -> int:
        """Other pickers at which something waits."""
        return sum(map(bool, self._by_picker.values()))

    @property
    def lowest(self) -> int | None:
        """The lowest priority of which something waits elsewhere."""
        return min(self.by_priority, default=None)

    def waits_before(self, band: BandKey) -> bool:
        """Whether something waits elsewhere that goes before whatever is in this band."""
        return bool(self._tokens) and min(self._tokens) < band

    def passed_over(self, band: BandKey, *, now: float) -> bool:
        """Whether every picker where something more pressing waits goes on with less pressing requests: it
        waits there for a server of its choice, and no server is kept free for it.
        """
        return all(
            self._passes_over(picker, pressing, now=now)
            for pressing, pickers in self._tokens.items()
            if pressing < band
            for picker in pickers
        )

    def _passes_over(self, picker: bytes, pressing: BandKey, *, now: float) -> bool:
        since = max(self._since[picker, pressing], now - LONGEST_DELAY_S)
        return any(band > pressing and at > since for band, at in self._went.get(picker, {}).items())

    def shorter(self, band: BandKey, tokens: int) -> int:
        """Pickers at which something waits in this band, and less than so many tokens."""
        return sum(other < tokens for other in self._tokens.get(band, {}).values())

    def of(self, priority: int | None, tenant: str | None) -> Load:
        """What waits elsewhere of this priority and tenant; of a priority; or in all."""
        if priority is None:
            return self.in_all
        if tenant is None:
            return self.by_priority.get(priority, NOTHING)
        return self.by_tenant.get((priority, tenant), NOTHING)

    def tokens_before(self, priority: int) -> int:
        """Tokens that wait elsewhere at this priority or above."""
        return sum(load.tokens for of, load in self.by_priority.items() if of >= priority)

    def hear(self, picker: bytes, row: Row, *, now: float) -> None:
        """Replace what is known to wait at that picker."""
        rows = self._by_picker.setdefault(picker, {})
        key = (row.priority, row.tenant, row.late)
        before = rows.pop(key, None)
        if before is not None:
            self._count(picker, key, before, -1)
        if row.requests > 0 and len(rows) < _MOST_ROWS:
            load = Load(row.requests, row.size_bytes, row.tokens)
            rows[key] = load
            self._count(picker, key, load, 1)
        band = (-row.priority, row.late)
        if picker in self._tokens.get(band, {}):
            self._since.setdefault((picker, band), now)
        else:
            self._since.pop((picker, band), None)
        if row.let_go_tokens:
            self._went.setdefault(picker, {})[band] = now

    def forget(self, picker: bytes) -> None:
        """Forget a picker that is gone or that sends all its rows again."""
        for key, load in self._by_picker.pop(picker, {}).items():
            self._count(picker, key, load, -1)
        self._went.pop(picker, None)
        for known in [known for known in self._since if known[0] == picker]:
            del self._since[known]

    def _count(self, picker: bytes, key: FlowKey, load: Load, sign: int) -> None:
        priority, tenant, late = key
        self.in_all.add_load(load, sign)
        of_priority = self.by_priority.setdefault(priority, Load())
        of_priority.add_load(load, sign)
        of_tenant = self.by_tenant.setdefault((priority, tenant), Load())
        of_tenant.add_load(load, sign)
        if not of_priority.requests:
            del self.by_priority[priority]
        if not of_tenant.requests:
            del self.by_tenant[priority, tenant]
        tokens = self._tokens.setdefault((-priority, late), {})
        tokens[picker] = tokens.get(picker, 0) + sign * load.tokens
        if not tokens[picker]:
            del tokens[picker]
            if not tokens:
                del self._tokens[-priority, late]

    def check_integrity(self) -> None:
        rows = [load for of in self._by_picker.values() for load in of.values()]
        for sums in ([self.in_all], self.by_priority.values(), self.by_tenant.values()):
            added = [sum(parts) for parts in zip(*(load.as_tuple() for load in sums), strict=True)]
            told = [sum(parts) for parts in zip(*(load.as_tuple() for load in rows), strict=True)]
            assert (added or [0, 0, 0]) == (told or [0, 0, 0])
        waits = {(picker, band) for band, of in self._tokens.items() for picker in of}
        assert self._since.keys() == waits
        assert sum(sum(of.values()) for of in self._tokens.values()) == self.in_all.tokens
        assert all(len(of) <= _MOST_ROWS for of in self._by_picker.values())
