"""The waiting requests at other pickers of the same servers, by their last reports. The bounds and the shares
of tenants apply to all pickers together.

Every picker has its own queue. For each tenant of each priority a picker reports two things to the others:
the requests that wait there now, and the tokens that it let go since its last report. `control` counts the
waiting requests in its bounds. It charges the tokens to the tenant as if it had let the requests go itself.

Invariants: the sums equal the rows in `_by_picker`. A picker has at most `_MOST_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from epp.flow.flow_settings import LONGEST_DELAY_S
from epp.flow.queues import BandKey, Load, Loads

_MOST_ROWS = 4096
"""The most rows that are kept of one other picker. Further rows are not counted."""
FlowKey = tuple[int, str, bool]
"""The priority, the tenant, and whether the requests are demoted."""
_NONE = (0, 0, 0)


class Row(NamedTuple):
    """One tenant's requests of one priority at one picker: those in time, or the demoted ones."""

    priority: int
    tenant: str
    late: bool
    let_go_tokens: int
    """The tokens let go since the last row about this tenant."""
    requests: int
    """The number of requests that wait now. `size_bytes` and `tokens` are the sums over these requests."""
    size_bytes: int
    tokens: int


class Reported:
    """Keeps what was reported to the other pickers of the requests that wait here, so that only changes are
    reported.
    """

    def __init__(self) -> None:
        self._sent: dict[FlowKey, tuple[int, int, int]] = {}

    def rows(
        self, waiting: Mapping[FlowKey, Load], charges: Mapping[FlowKey, int], *, anew: bool
    ) -> Sequence[Row]:
        """Return the rows that other pickers do not know yet. `charges` are the tokens let go since the last
        call. `anew` says that the other pickers know nothing.
        """
        before = {} if anew else self._sent
        now = self._sent = {key: load.as_tuple() for key, load in waiting.items()}
        changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        return [Row(*key, charges.get(key, 0), *now.get(key, _NONE)) for key in changed | charges.keys()]


class Elsewhere(Loads):
    def __init__(self) -> None:
        super().__init__()
        self._by_picker: dict[bytes, dict[FlowKey, Load]] = {}
        self._tokens: dict[BandKey, dict[bytes, int]] = {}
        """Waiting tokens, by band and picker."""
        self._since: dict[tuple[bytes, BandKey], float] = {}
        """Since when requests wait in this band at this picker, by its reports."""
        self._went: dict[bytes, dict[BandKey, float]] = {}
        """When the picker last let a request go, by band."""

    @property
    def pickers(self) -> int:
        """Return the number of other pickers at which requests wait."""
        return sum(map(bool, self._by_picker.values()))

    @property
    def lowest(self) -> int | None:
        """Return the lowest priority of the requests that wait at other pickers."""
        return min(self.by_priority, default=None)

    def waits_before(self, band: BandKey) -> bool:
        """Return whether a request that goes before every request of this band waits at another picker."""
        return bool(self._tokens) and min(self._tokens) < band

    def passed_over(self, band: BandKey, *, now: float) -> bool:
        """Return whether every picker that holds requests before this band goes on to send less pressing
        requests. If so, the more pressing requests wait there for one certain server, and no server is kept
        free for them.
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
        """Return the number of pickers at which requests wait in this band and have fewer tokens in all than
        `tokens`.
        """
        return sum(other < tokens for other in self._tokens.get(band, {}).values())

    def replace(self, picker: bytes, row: Row, *, now: float) -> None:
        """Take a row of another picker, in place of its last row about this tenant and priority."""
        rows = self._by_picker.setdefault(picker, {})
        key = (row.priority, row.tenant, row.late)
        before = rows.pop(key, None)
        if before is not None:
            self._count_row(picker, key, before, -1)
        if row.requests > 0 and len(rows) < _MOST_ROWS:
            load = Load(row.requests, row.size_bytes, row.tokens)
            rows[key] = load
            self._count_row(picker, key, load, 1)
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
            self._count_row(picker, key, load, -1)
        self._went.pop(picker, None)
        for known in [known for known in self._since if known[0] == picker]:
            del self._since[known]

    def _count_row(self, picker: bytes, key: FlowKey, load: Load, sign: int) -> None:
        priority, tenant, late = key
        self.count(priority, tenant, sign * load.requests, sign * load.size_bytes, sign * load.tokens)
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
            total = [sum(parts) for parts in zip(*(load.as_tuple() for load in rows), strict=True)]
            assert (added or [0, 0, 0]) == (total or [0, 0, 0])
        waits = {(picker, band) for band, of in self._tokens.items() for picker in of}
        assert self._since.keys() == waits
        assert sum(sum(of.values()) for of in self._tokens.values()) == self.in_all.tokens
        assert all(len(of) <= _MOST_ROWS for of in self._by_picker.values())
