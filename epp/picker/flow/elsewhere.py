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

from epp.picker.flow.queues import Loads, QueueLoad

_MOST_ROWS = 4096
"""The most rows that are kept of one other picker. Further rows are not counted."""
FlowKey = tuple[int, str]
"""The priority and the tenant."""
_NONE = (0, 0, 0)


class Row(NamedTuple):
    """One tenant's requests of one priority at one picker."""

    priority: int
    tenant: str
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
        self, waiting: Mapping[FlowKey, QueueLoad], charges: Mapping[FlowKey, int], *, anew: bool
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
        self._by_picker: dict[bytes, dict[FlowKey, QueueLoad]] = {}

    def waits_above(self, priority: int) -> bool:
        """Return whether a request of a higher priority waits at another picker."""
        return max(self.by_priority, default=priority) > priority

    def replace(self, picker: bytes, row: Row) -> None:
        """Take a row of another picker, in place of its last row about this tenant and priority."""
        rows = self._by_picker.setdefault(picker, {})
        key = (row.priority, row.tenant)
        before = rows.pop(key, None)
        if before is not None:
            self.count(*key, -before.requests, -before.size_bytes, -before.tokens)
        if row.requests > 0 and len(rows) < _MOST_ROWS:
            rows[key] = QueueLoad(row.requests, row.size_bytes, row.tokens)
            self.count(*key, row.requests, row.size_bytes, row.tokens)

    def forget(self, picker: bytes) -> None:
        """Forget a picker that is gone or that sends all its rows again."""
        for key, load in self._by_picker.pop(picker, {}).items():
            self.count(*key, -load.requests, -load.size_bytes, -load.tokens)

    def check_integrity(self) -> None:
        rows = [load for of in self._by_picker.values() for load in of.values()]
        for sums in ([self.in_all], self.by_priority.values(), self.by_tenant.values()):
            added = [sum(parts) for parts in zip(*(load.as_tuple() for load in sums), strict=True)]
            total = [sum(parts) for parts in zip(*(load.as_tuple() for load in rows), strict=True)]
            assert (added or [0, 0, 0]) == (total or [0, 0, 0])
        assert all(len(of) <= _MOST_ROWS for of in self._by_picker.values())
