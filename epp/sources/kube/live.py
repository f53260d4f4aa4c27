"""Holds the live numbers of the pools, and computes the hit ratio of the last minutes. Pure.

The composition root reports the picker's state as `Live`. `HitRatio` makes a ratio of the servers' own
counters. The servers count the requests of all pickers together, so every replica would write the same ratio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_SLICE_S: Final = 30.0
_SLICES: Final = 10


@dataclass(frozen=True, slots=True)
class LiveEndpoint:
    name: str
    pool: str
    why_not: str = ""
    """Why no request goes to the endpoint. Empty: requests may go there."""
    queries_tokens: float | None = None
    """Counter: prompt tokens that the server looked up in its prefix cache. None: no fresh value is known."""
    hits_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """The current state of the pools, as the picker sees them."""

    endpoints: Sequence[LiveEndpoint] = ()
    tried_picks: int = 0
    """Picks that a policy in DryRun has scored too. In `tried_agreed` of them it chose the same endpoint."""
    tried_agreed: int = 0
    models: frozenset[str] | None = None
    """Every model that a server lists. None: not every server has given its list."""
    saturation: float | None = None
    """The largest saturation of any base model. None: flow control is off."""


def ratio_text(part: float, whole: float) -> str | None:
    """Return the ratio in the format of the status. None: there is nothing to divide by."""
    return f"{min(1.0, max(0.0, part / whole)):.3f}" if whole > 0 else None


class HitRatio:
    """Hits divided by queries, of all endpoints in the last five minutes, in slices of half a minute."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._slices: deque[list[float]] = deque(maxlen=_SLICES)
        """For each slice: its beginning, queries and hits."""

    def observe(self, endpoints: Sequence[LiveEndpoint], *, now: float) -> None:
        """Add the counters of the endpoints. A counter that went back belongs to a new process, so its first
        value is left out.
        """
        if not self._slices or now - self._slices[-1][0] >= _SLICE_S:
            self._slices.append([now, 0.0, 0.0])
        current = self._slices[-1]
        seen: dict[str, tuple[float, float]] = {}
        for e in endpoints:
            if e.queries_tokens is None or e.hits_tokens is None:
                if e.name in self._last:
                    seen[e.name] = self._last[e.name]
                continue
            counters = seen[e.name] = (e.queries_tokens, e.hits_tokens)
            before = self._last.get(e.name)
            if before is not None and counters[0] >= before[0] and counters[1] >= before[1]:
                current[1] += counters[0] - before[0]
                current[2] += counters[1] - before[1]
        self._last = seen

    def text(self, *, now: float) -> str | None:
        """Return the ratio in the format of the status. None means that no tokens were looked up yet."""
        recent = [s for s in self._slices if now - s[0] < _SLICES * _SLICE_S]
        return ratio_text(sum(s[2] for s in recent), sum(s[1] for s in recent))

    def check_integrity(self) -> None:
        assert len(self._slices) <= _SLICES
        assert all(s[2] >= 0 and s[1] >= 0 for s in self._slices)
