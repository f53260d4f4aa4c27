"""Measures the tokens of the requests that are let go and refused, in each second. Retry-After and the
saturation gauge use these rates.
"""

from __future__ import annotations

from math import ceil, exp, inf

_WINDOW_S = 10.0
_RESTS_S = 1.0
"""If no picker has let a request go for this long, the reports of other pickers may be old."""
_MOST_S = 3600
"""The longest Retry-After, and the longest wait in the saturation: a server that computes nothing may seem
busy for ever.
"""
_MOMENT_S = 0.05
"""Tokens that are added within this time count as added at its beginning. The error is half a percent of the
window.
"""


class Rate:
    """Tokens per second over about the last ten seconds. Older tokens count less."""

    __slots__ = ("_at", "_began_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = -inf
        self._began_at: float | None = None

    def add(self, tokens: float, *, now: float) -> None:
        if now - self._at < _MOMENT_S:
            self._sum += tokens
            return
        if self._began_at is None:
            self._began_at = self._at = now
        self._sum = self._sum * exp(-max(0.0, now - self._at) / _WINDOW_S) + tokens
        self._at = max(self._at, now)

    @property
    def last_at(self) -> float:
        """Return when tokens were last added, to within `_MOMENT_S`; -inf: never."""
        return self._at

    def per_s(self, *, now: float) -> float:
        """Return the tokens per second; 0 if none were added."""
        if self._began_at is None:
            return 0.0
        age_s = max(0.1, now - self._began_at)
        decayed = self._sum * exp(-max(0.0, now - self._at) / _WINDOW_S)
        return decayed / (_WINDOW_S * (1 - exp(-age_s / _WINDOW_S)))


class Pace:
    __slots__ = ("_refused", "elsewhere_at", "let_go")

    def __init__(self) -> None:
        self.let_go = Rate()
        """Tokens that this picker let go."""
        self.elsewhere_at = -inf
        """When another picker last let a request go, by its reports."""
        self._refused = Rate()

    def refused(self, tokens: int, *, now: float) -> None:
        self._refused.add(tokens, now=now)

    def rests(self, *, now: float) -> bool:
        """Return whether no picker has let a request go for `_RESTS_S`."""
        return now - max(self.let_go.last_at, self.elsewhere_at) >= _RESTS_S

    def retry_after_s(self, tokens: float, *, now: float) -> int:
        """Return the time until this many tokens have gone, in whole seconds; 1 if the time is unknown."""
        drain_s = self._drain_s(tokens, now=now)
        return max(1, min(_MOST_S, ceil(drain_s))) if drain_s is not None else 1

    def saturation(self, wait_s: float, tokens: float, *, goal_s: float, now: float) -> float:
        """Return the saturation. 0: idle. 1: a new request waits for `goal_s`. Above 1: the fleet is too
        small for its load.

        wait_s: the time until the first server is free. tokens: the tokens that wait.
        """
        drain_s = self._drain_s(tokens, now=now) if tokens else 0.0
        if drain_s is None:
            drain_s = goal_s
        waited = (min(wait_s, _MOST_S) + drain_s) / goal_s
        excess = self._excess(now=now)
        return max(waited, excess) if excess > 1 else waited

    def _drain_s(self, tokens: float, *, now: float) -> float | None:
        """Return how long it takes until this picker has let this many tokens go. None means that this is
        unknown, because no request went recently.
        """
        rate = self.let_go.per_s(now=now)
        return tokens / rate if rate > 1e-3 else None

    def _excess(self, *, now: float) -> float:
        """Return the tokens that came recently, divided by the tokens that could be let go. 1: nothing was
        refused.
        """
        if now - self._refused.last_at > _WINDOW_S:
            return 1.0  # once no request comes any more, both rates fall alike, and their ratio would stay
        let_go = self.let_go.per_s(now=now)
        refused = self._refused.per_s(now=now)
        return 1 + refused / max(let_go, 1e-3) if refused > 1e-3 * let_go else 1.0
