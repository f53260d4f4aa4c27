"""Learns about a model from all of its servers together: how many tokens a prompt makes, and how much the
servers' caches keep.

`TokenEstimate` learns from sampled answers and from the servers' counters. `CacheSize` learns from the hits
that servers count. The windows of each server's state (`CounterWindow`, `HitWindow`) hold what
requests add to the comparison. The prefill rate is not here, since servers differ in it (`prefill_rate`).

Pure arithmetic. Times are monotonic seconds. The picker calls this module with the counters of pages and with
the usage of sampled answers. A pick only reads `TokenEstimate.terms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from epp.base.types import EndpointMetrics, PromptSize
from epp.picker.endpoints.growth import growth
from epp.picker.endpoints.least_squares import Three, ThreeTerms

_WINDOW_REQUESTS = 20
"""Requests between two samples from counters."""
_PRIOR_TOKENS = 500.0
_OPAQUE_BYTES = 2000
"""The number of tokens in this many bytes of text is about as uncertain as that of one picture."""
_PRIOR_OPAQUE = 0.00005
"""Weight of the prior that a picture takes no tokens, as a fraction of the weight of one request with a
picture."""
_KEEP_TOKENS = 200_000.0
"""Older samples together count as this many tokens at most, so that a change of traffic shows within some
hundred requests.
"""
MOST_BYTES_PER_TOKEN = 64.0
_MOST_TOKENS_PER_BYTE = 2.0
"""A tokenizer makes at most one token of a byte. A chat template adds the rest."""
_MOST_TOKENS_PER_OPAQUE = 200_000.0
"""The most tokens that a picture or other media may count for, such as a long film."""

_TRUE_ENOUGH = 0.6
"""The assumed size stays as it is when this share of the stalest predictions is right."""
_GAIN_OF_SIZE = 0.03
"""Growth of the size's logarithm for each stale prediction while all stale predictions are right."""
_PRIOR_HITS = 2.0
"""Weight of the prior, in requests. The prior says that all predictions are right."""
_KEEP_PREDICTIONS = 200.0
"""Older evidence is scaled down, so that it counts as at most this many stale predictions."""
_HITS_WINDOW_S = 0.5
_WIPED_PREDICTIONS = 2.5
"""If more predictions from fresh prefixes than this bring no hit, the server has emptied its cache."""


@dataclass(slots=True, eq=False)
class CounterWindow:
    """Pairs our own finished requests with one server's counters, to learn the tokens of prompts without
    sampled answers (`sample_of`).

    A window teaches only if the server finished as many requests as we sent there. Otherwise the requests of
    other clients or replicas would be taken for ours.
    """

    start: EndpointMetrics | None = None
    own: int = 0
    size: PromptSize = field(default_factory=lambda: PromptSize(0))
    """The sizes of these prompts together."""


@dataclass(slots=True, eq=False)
class Staleness:
    """Decides which predictions count as stale, for all servers of a model. See `CacheSize`."""

    unused_s: float = 30.0
    """A prefix that was unused for longer is stale. The value follows the quantile of predicted tokens."""
    typical_tokens: float = 0.0
    """Typical number of tokens in a prediction."""


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
    """All tokens predicted since the server is known. This total and the next outlive the window."""
    missed_tokens: float = 0.0
    """Tokens predicted from fresh prefixes since the server last counted a hit."""


class TokenEstimate:
    """Estimates the tokens of a prompt without a tokenizer, for one model. Sizes are those of canonical
    prompts.

        tokens = a * bytes + b * bytes that continue a letter beyond ASCII + c * pictures and the like

    The three factors are fitted by weighted least squares with sums that forget old samples, so a single odd
    sample cannot change the estimate much. The estimate starts with the bytes per token of the policy. The
    mean of bytes per token over all traffic is kept too: it converts the size of a cache from tokens to bytes
    of prompts.
    """

    __slots__ = ("_bytes", "_fit", "_start", "_tokens", "terms")

    def __init__(self, *, start: float) -> None:
        self._start = start
        self._tokens = _PRIOR_TOKENS
        self._bytes = start * _PRIOR_TOKENS
        self._fit = ThreeTerms()
        self.terms: Three = (1 / start, 0.0, 0.0)
        """The factors a, b and c."""

    @property
    def bytes_per_token(self) -> float:
        """The mean bytes per token over everything that was learned."""
        return self._bytes / self._tokens

    def learn(self, size: PromptSize, tokens: float) -> None:
        """Learn from the size of a prompt, or of several together, and the tokens that a server counted.
        Impossible samples are ignored, since all servers share this estimate.
        """
        most = _MOST_TOKENS_PER_BYTE * size.text_bytes + _MOST_TOKENS_PER_OPAQUE * size.opaque
        if size.text_bytes <= 0 or not max(1.0, size.text_bytes / MOST_BYTES_PER_TOKEN) <= tokens <= most:
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
        self.terms = self._fit.solve(
            prior=(1 / self._start, 0.0, 0.0), trust=(by_bytes, by_bytes / 100, _PRIOR_OPAQUE)
        )


class CacheSize:
    """Learns the real size of the prefix caches of one model's servers. `factor` is the real size divided by
    the stated or assumed size.

    If the mirror of a cache is larger than the cache, it lists prefixes that are gone. If it is smaller, it
    forgets prefixes that are still there. Both errors show in predictions about the prefixes that were unused
    for the longest time, because those are evicted first. So predictions are divided by how long their prefix
    was unused, into the stalest tenth and the rest. The hits that the servers count are then explained as

        hits = a * tokens predicted from fresher prefixes + b * tokens predicted from the stalest
             + c * tokens not predicted

    The three factors are fitted by weighted least squares over all servers of a model. The ratio of `b` to
    `a` says how often the stalest predictions are right. Errors that all predictions share (a wrong estimate
    of tokens, chunks with other borders than blocks) are in `a` and in `b` and cancel. Hits that were not
    predicted are in `c`. While the stalest predictions are right, the caches are at least as large as
    assumed, and the assumed size grows. Where these predictions are wrong, the assumed size shrinks.
    """

    __slots__ = ("_evidence", "_fit", "factor", "staleness")

    def __init__(self) -> None:
        self.factor = 1.0
        self.staleness = Staleness()
        self._evidence = 0.0
        """Number of stale predictions in the fit."""
        self._fit = ThreeTerms()

    def observe(
        self,
        window: HitWindow,
        *,
        hits: float,
        waiting: int | None,
        bounded: bool,
        span: float,
        now: float,
    ) -> bool:
        """Take in a scrape of one server. Return whether the server has emptied its cache.

        bounded: the server's mirror is full, so a larger mirror would hold more. span: the factor stays
        between 1/span and span.
        """
        if window.opened_at is None or hits < window.hits_before:
            _open(window, hits, now)
            return False
        if now - window.opened_at < _HITS_WINDOW_S or waiting != 0 or not window.requests:
            return False  # waiting requests are in the predictions and not yet in the counters
        self._learn(window, hits - window.hits_before)
        step = _GAIN_OF_SIZE * window.stale_requests * (self.truth - _TRUE_ENOUGH) / (1 - _TRUE_ENOUGH)
        if step < 0 or bounded:
            self.factor = min(span, max(1 / span, self.factor * math.exp(step)))
        hit = hits > window.hits_before
        window.missed_tokens = 0.0 if hit else window.missed_tokens + window.fresh_tokens
        _open(window, hits, now)
        if window.missed_tokens <= _WIPED_PREDICTIONS * self.staleness.typical_tokens:
            return False
        window.missed_tokens = 0.0
        return True

    def _learn(self, window: HitWindow, hits: float) -> None:
        self._evidence += window.stale_requests
        if self._evidence > _KEEP_PREDICTIONS:
            self._fit.scale(_KEEP_PREDICTIONS / self._evidence)
            self._evidence = _KEEP_PREDICTIONS
        terms = (window.fresh_tokens, window.stale_tokens, window.other_tokens)
        self._fit.add(terms, hits, weight=1 / window.requests)

    @property
    def truth(self) -> float:
        """How often the stalest predictions are right in proportion to the others, from 0 to 1."""
        trust = _PRIOR_HITS * max(1.0, self.staleness.typical_tokens) ** 2
        fresh, stale, _ = self._fit.solve(prior=(1.0, 1.0, 0.0), trust=(trust, trust, trust))
        if fresh <= 0:
            return 1.0 if stale >= 0 else 0.0
        return min(1.0, max(0.0, stale / fresh))


def sample_of(window: CounterWindow, after: EndpointMetrics) -> tuple[PromptSize, float] | None:
    """Return size and tokens of the requests of a window, if the window closes with this page and all its
    requests were ours.
    """
    start = window.start
    if start is None or after.finished is None or after.finished < (start.finished or 0):
        _restart(window, after)
        return None
    if window.own < _WINDOW_REQUESTS or after.inside != 0:
        return None  # counters and finished requests agree only while nothing is in flight
    finished = growth(start.finished, after.finished)
    sample = (window.size, growth(start.prompt_tokens, after.prompt_tokens))
    ours_alone = finished == window.own
    _restart(window, after)
    return sample if ours_alone else None


def _restart(window: CounterWindow, after: EndpointMetrics) -> None:
    window.start = after if after.inside == 0 else None
    window.own, window.size = 0, PromptSize(0)


def _open(window: HitWindow, hits: float, now: float) -> None:
    window.opened_at, window.hits_before = now, hits
    window.fresh_tokens = window.stale_tokens = window.other_tokens = 0.0
    window.requests = window.stale_requests = 0


@dataclass(frozen=True, slots=True)
class Learned:
    """The learned figures of one model."""

    tokens: TokenEstimate
    cache: CacheSize
