"""Predicts whether more urgent requests will come. A request that is sent now may delay them.

If no more urgent request is expected, holding a request gains nothing. The request then goes at once, as if
there were no flow control. Requests like those of the last seconds are expected to come again.
"""

from __future__ import annotations

from math import inf

from epp.flow.queues import BandKey

_EXPECTED_S = 30.0
"""A kind of request that has not come for this long is no longer expected."""


class _Seen:
    """When requests of one priority last came, and when requests of a second tenant last came."""

    __slots__ = ("at", "other_at", "tenant")

    def __init__(self) -> None:
        self.tenant = ""
        self.at = -inf
        self.other_at = -inf
        """When a request of a tenant other than `tenant` last came."""


class Expected:
    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        """By priority. The caller keeps a bounded number of priorities."""

    def came(self, priority: int, tenant: str, *, now: float) -> None:
        """Note that a request came."""
        seen = self._seen.get(priority)
        if seen is None:
            self._seen = {p: s for p, s in self._seen.items() if s.at > now - _EXPECTED_S}
            seen = self._seen[priority] = _Seen()
        if tenant != seen.tenant:
            seen.tenant, seen.other_at = tenant, seen.at
        seen.at = now

    def more_pressing(self, band: BandKey, *, now: float) -> bool:
        """Return whether a request may come that should go before the requests of this band: a request of a
        higher priority, of another tenant, or one that is in time if this band is demoted.
        """
        if band[1]:
            return True
        since, priority = now - _EXPECTED_S, -band[0]
        for of, seen in self._seen.items():
            if (of > priority and seen.at > since) or (of == priority and seen.other_at > since):
                return True
        return False
