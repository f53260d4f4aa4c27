"""Bytes of prompt text to a token, learned from sampled answers and from the servers' counters.

A ratio of sums that forget, so a single odd sample cannot move it far; it starts from the policy's value.
"""

from __future__ import annotations

from epp.endpoints.growth import growth
from epp.types import EndpointMetrics

_WINDOW_REQUESTS = 20
"""Requests between two samples of bytes per token from counters."""
_PRIOR_TOKENS = 500.0
_KEEP_TOKENS = 200_000.0
"""Evidence beyond this is scaled down, so that a change of traffic shows within some hundred requests."""


class BytesPerToken:
    """Bytes of canonical prompt text to one token of the model, from pairs that belong together."""

    __slots__ = ("_bytes", "_tokens")

    def __init__(self, *, start: float) -> None:
        self._tokens = _PRIOR_TOKENS
        self._bytes = start * _PRIOR_TOKENS

    @property
    def ratio(self) -> float:
        return self._bytes / self._tokens

    def tokens(self, size_bytes: int) -> int:
        """Estimate of the tokens in so many bytes."""
        return int(size_bytes / self.ratio)

    def learn(self, size_bytes: float, tokens: float) -> None:
        if size_bytes <= 0 or tokens <= 0:
            return
        self._bytes += size_bytes
        self._tokens += tokens
        if self._tokens > _KEEP_TOKENS:
            scale = _KEEP_TOKENS / self._tokens
            self._bytes *= scale
            self._tokens *= scale


class CounterWindow:
    """Pairs our own finished requests with one server's counters, to learn bytes per token without sampling.

    A sample counts only if the server finished as many requests as we sent there: other clients or replicas would
    otherwise be taken for ours.
    """

    __slots__ = ("_own", "_own_bytes", "_start")

    def __init__(self) -> None:
        self._start: EndpointMetrics | None = None
        self._own = 0
        self._own_bytes = 0

    def ended(self, size_bytes: int) -> None:
        self._own += 1
        self._own_bytes += size_bytes

    def observe(self, after: EndpointMetrics) -> tuple[int, float] | None:
        """(bytes, tokens) of a window that was ours alone, if one closes with this scrape."""
        start = self._start
        if start is None or after.finished is None or after.finished < (start.finished or 0):
            self._restart(after)
            return None
        if self._own < _WINDOW_REQUESTS or after.running or after.waiting:
            return None  # counters and ends meet only while nothing is in flight
        finished = growth(start.finished, after.finished)
        sample = (self._own_bytes, growth(start.prompt_tokens, after.prompt_tokens))
        ours_alone = finished == self._own
        self._restart(after)
        return sample if ours_alone else None

    def _restart(self, after: EndpointMetrics) -> None:
        self._start = after if not (after.running or after.waiting) else None
        self._own = 0
        self._own_bytes = 0
