"""Estimates the tokens of a prompt without a tokenizer. The estimate is learned from sampled answers and from
the servers' counters.

    tokens = a * bytes + b * bytes that continue a letter beyond ASCII + c * pictures and the like

by weighted least squares with sums that forget old samples, so a single odd sample cannot change the estimate
much. It starts with the bytes per token of the policy. The module also keeps the mean of bytes per token over
all traffic, which converts the size of a cache from tokens to bytes of prompts.
"""

from __future__ import annotations

from epp.endpoints.growth import growth
from epp.endpoints.least_squares import ThreeTerms
from epp.types import EndpointMetrics, PromptSize

_WINDOW_REQUESTS = 20
"""Requests between two samples from counters."""
_PRIOR_TOKENS = 500.0
_OPAQUE_BYTES = 2000
"""This many bytes of text are about as uncertain as one picture."""
_PRIOR_OPAQUE = 0.00005
"""Weight of the prior that a picture takes no tokens, as a fraction of the weight of one request with a
picture."""
_KEEP_TOKENS = 200_000.0
"""Older evidence is scaled down to this, so that a change of traffic shows within some hundred requests."""
_MOST_BYTES_PER_TOKEN = 64.0
_MOST_TOKENS_PER_BYTE = 2.0
"""A tokenizer makes at most one token of a byte. A chat template adds the rest."""
_MOST_TOKENS_PER_OPAQUE = 200_000.0
"""Most tokens of a picture or the like, such as a long film."""


class TokenEstimate:
    """The estimate for one model. Sizes are those of canonical prompts."""

    __slots__ = ("_bytes", "_fit", "_start", "_terms", "_tokens")

    def __init__(self, *, start: float) -> None:
        self._start = start
        self._tokens = _PRIOR_TOKENS
        self._bytes = start * _PRIOR_TOKENS
        self._fit = ThreeTerms()
        self._terms = (1 / start, 0.0, 0.0)

    @property
    def bytes_per_token(self) -> float:
        """Mean over everything that was learned."""
        return self._bytes / self._tokens

    def tokens(self, size: PromptSize) -> int:
        """Estimated tokens of one prompt, at least one for each 64 bytes."""
        a, b, c = self._terms
        told = a * size.text_bytes + b * size.continuation_bytes + c * size.opaque
        return int(max(told, size.text_bytes / _MOST_BYTES_PER_TOKEN))

    def learn(self, size: PromptSize, tokens: float) -> None:
        """Learn from the size of a prompt, or of several together, and the tokens that a server counted.
        Impossible samples are ignored, since all servers share this estimate.
        """
        most = _MOST_TOKENS_PER_BYTE * size.text_bytes + _MOST_TOKENS_PER_OPAQUE * size.opaque
        if size.text_bytes <= 0 or not max(1.0, size.text_bytes / _MOST_BYTES_PER_TOKEN) <= tokens <= most:
            return
        self._bytes += size.text_bytes
        self._tokens += tokens
        # The estimate's error grows with the prompt, so a few large prompts must not outweigh the rest.
        weight = 1 / (size.text_bytes + _OPAQUE_BYTES * size.opaque)
        self._fit.add((size.text_bytes, size.continuation_bytes, size.opaque), tokens, weight=weight)
        if self._tokens > _KEEP_TOKENS:
            scale = _KEEP_TOKENS / self._tokens
            self._bytes *= scale
            self._tokens *= scale
            self._fit.scale(scale)
        by_bytes = _PRIOR_TOKENS * self._start
        self._terms = self._fit.solve(
            prior=(1 / self._start, 0.0, 0.0), trust=(by_bytes, by_bytes / 100, _PRIOR_OPAQUE)
        )


class CounterWindow:
    """Pairs our own finished requests with one server's counters, to learn without sampled answers.

    A sample counts only if the server finished as many requests as we sent there. Otherwise the requests of
    other clients or replicas would be taken for ours.
    """

    __slots__ = ("_own", "_size", "_start")

    def __init__(self) -> None:
        self._start: EndpointMetrics | None = None
        self._own = 0
        self._size = PromptSize(0)

    def ended(self, size: PromptSize) -> None:
        self._own += 1
        whole = self._size
        self._size = PromptSize(
            whole.text_bytes + size.text_bytes,
            whole.continuation_bytes + size.continuation_bytes,
            whole.opaque + size.opaque,
        )

    def observe(self, after: EndpointMetrics) -> tuple[PromptSize, float] | None:
        """If a window closes with this scrape and all its requests were ours: their size and tokens."""
        start = self._start
        if start is None or after.finished is None or after.finished < (start.finished or 0):
            self._restart(after)
            return None
        if self._own < _WINDOW_REQUESTS or after.inside != 0:
            return None  # counters and finished requests agree only while nothing is in flight
        finished = growth(start.finished, after.finished)
        sample = (self._size, growth(start.prompt_tokens, after.prompt_tokens))
        ours_alone = finished == self._own
        self._restart(after)
        return sample if ours_alone else None

    def _restart(self, after: EndpointMetrics) -> None:
        self._start = after if after.inside == 0 else None
        self._own = 0
        self._size = PromptSize(0)
