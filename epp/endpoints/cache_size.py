"""Learns from hits how much the prefix caches of a model's servers really keep, as a share of the assumed
size.

If the mirror of a cache is larger than the cache, it lists prefixes that are gone. If it is smaller, it
forgets prefixes that are still there. Both errors show in predictions about the prefixes that were unused for
the longest time, because those are evicted first. So predictions are divided by how long their prefix was
unused, into the stalest tenth and the rest. The hits that the servers count are then explained as

    hits = a * tokens predicted from fresher prefixes + b * tokens predicted from the stalest + c * tokens not
    predicted

by weighted least squares over all servers of a model. The ratio of `b` to `a` says how often the stalest
predictions are right. Errors that all predictions share (a wrong estimate of tokens, chunks with other
borders than blocks) are in both and cancel. Hits that were not predicted are in `c`. While the stalest
predictions are right, the caches are at least as large as assumed, and the assumed size grows. Where they are
wrong, it shrinks.

Pure arithmetic; times are monotonic seconds. The picker calls it with predictions at picks and with counters
at scrapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epp.endpoints.least_squares import ThreeTerms

_STALE_SHARE = 0.1
"""Share of the predicted tokens that count as the stalest."""
_STALE_START_S = 30.0
_STALE_STEP = 0.05
_TRUE_ENOUGH = 0.6
"""The assumed size stays as it is when this share of the stalest predictions is right."""
_GAIN = 0.03
"""Growth of the size's logarithm for each stale prediction while all stale predictions are right."""
_PRIOR = 2.0
"""Weight of the prior, in requests. The prior says that all predictions are right."""
_KEEP = 200.0
"""Older evidence is scaled down, so that it counts as at most this many stale predictions."""
_WINDOW_S = 0.5


@dataclass(slots=True, eq=False)
class HitWindow:
    """Predictions for one server since the last time that predictions and counters were compared."""

    opened_at: float | None = None
    hits_before: float = 0.0
    fresh_tokens: float = 0.0
    stale_tokens: float = 0.0
    other_tokens: float = 0.0
    """Prompt tokens that were not predicted to be cached."""
    requests: int = 0
    stale_requests: int = 0
    predicted_tokens: int = 0
    """All tokens predicted since the server is known. The only total here that outlives the window."""


class CacheSize:
    """Cache size of the servers of one model. `factor` is the size divided by the stated or assumed size."""

    __slots__ = ("_evidence", "_fit", "_stale_s", "_typical_tokens", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._stale_s = _STALE_START_S
        """A prefix that was unused for longer is stale. Follows the quantile of predicted tokens."""
        self._typical_tokens = 0.0
        """Typical number of tokens in a prediction."""
        self._evidence = 0.0
        """Number of stale predictions in the fit."""
        self._fit = ThreeTerms()

    def predicted(self, window: HitWindow, *, tokens: int, others: int, unused_s: float) -> None:
        """Count a request: `tokens` of its prompt are believed to be cached, in a prefix that was unused for
        `unused_s`; `others` are not.
        """
        window.requests += 1
        window.other_tokens += others
        if not tokens:
            return
        self._typical_tokens += 0.05 * (tokens - self._typical_tokens) if self._typical_tokens else tokens
        weight = min(1.0, tokens / self._typical_tokens) * _STALE_STEP
        window.predicted_tokens += tokens
        if unused_s > self._stale_s:
            self._stale_s *= 1 + weight * (1 - _STALE_SHARE)
            window.stale_tokens += tokens
            window.stale_requests += 1
        else:
            self._stale_s = max(1e-3, self._stale_s * (1 - weight * _STALE_SHARE))
            window.fresh_tokens += tokens

    def observe(
        self,
        window: HitWindow,
        *,
        hits: float,
        waiting: int | None,
        bounded: bool,
        span: float,
        now: float,
    ) -> None:
        """Take in a scrape of one server.

        bounded: the server's mirror is full, so a larger one would hold more;
        span: the factor stays between 1/span and span.
        """
        if window.opened_at is None or hits < window.hits_before:
            _open(window, hits, now)
            return
        if now - window.opened_at < _WINDOW_S or waiting != 0 or not window.requests:
            return  # waiting requests are in the predictions and not yet in the counters
        self._learn(window, hits - window.hits_before)
        step = _GAIN * window.stale_requests * (self.truth - _TRUE_ENOUGH) / (1 - _TRUE_ENOUGH)
        if step < 0 or bounded:
            self.factor = min(span, max(1 / span, self.factor * math.exp(step)))
        _open(window, hits, now)

    def _learn(self, window: HitWindow, hits: float) -> None:
        self._evidence += window.stale_requests
        if self._evidence > _KEEP:
            self._fit.scale(_KEEP / self._evidence)
            self._evidence = _KEEP
        terms = (window.fresh_tokens, window.stale_tokens, window.other_tokens)
        self._fit.add(terms, hits, weight=1 / window.requests)

    @property
    def truth(self) -> float:
        """How often the stalest predictions are right in proportion to the others, from 0 to 1."""
        trust = _PRIOR * max(1.0, self._typical_tokens) ** 2
        fresh, stale, _ = self._fit.solve(prior=(1.0, 1.0, 0.0), trust=(trust, trust, trust))
        if fresh <= 0:
            return 1.0 if stale >= 0 else 0.0
        return min(1.0, max(0.0, stale / fresh))


def _open(window: HitWindow, hits: float, now: float) -> None:
    window.opened_at, window.hits_before = now, hits
    window.fresh_tokens = window.stale_tokens = window.other_tokens = 0.0
    window.requests = window.stale_requests = 0
