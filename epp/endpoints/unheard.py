"""How many requests other pickers have sent lately of which this picker has not heard yet.

News of a request arrives some time after it was sent. By Little's law the number of requests that are on the
way as news is their rate times this time, so it is the sum of the ages at which they were heard in a second.
Pure: `now` is monotonic seconds. Owned by the fleet, told by the listener of `epp.sharing`, read for picks.

Invariant: 0 <= `_picks`.
"""

from __future__ import annotations

from math import exp

_OVER_S = 1.0
"""Ages are summed over about this long."""
_MOST_AGE_S = 1.0
"""Older news come after an interruption and say nothing about the usual delay."""
_NEGLIGIBLE = 0.01


class Unheard:
    __slots__ = ("_at", "_picks", "any")

    def __init__(self) -> None:
        self._picks = 0.0
        self._at = 0.0
        self.any = False
        """Whether any news came, so that pickers share."""

    def heard(self, *, age_s: float, now: float) -> None:
        """News came of one request that another picker sent `age_s` ago."""
        self._picks = self.picks(now=now) + min(max(age_s, 0.0), _MOST_AGE_S) / _OVER_S
        self._at = now
        self.any = True

    def picks(self, *, now: float) -> float:
        """The estimate. 0 where pickers do not share."""
        if not self._picks:
            return 0.0
        left = self._picks * exp(min(0.0, self._at - now) / _OVER_S)
        return left if left > _NEGLIGIBLE else 0.0

    def check_integrity(self) -> None:
        assert self._picks >= 0
