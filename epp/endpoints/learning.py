"""What is learned about a server from its own counters: how fast it computes prompts, and bytes of text to a token.

Both are ratios of decayed sums, so a single odd sample cannot move them far, and both start from the policy's value.
"""

from __future__ import annotations

from epp.types import EndpointMetrics

_HALF_LIFE_S = 60.0
_PRIOR_WEIGHT_S = 0.5
"""The policy's rate counts as so many seconds of evidence."""
_WINDOW_REQUESTS = 20
"""Requests between two samples of bytes per token from counters."""
_PRIOR_TOKENS = 500.0
_KEEP_TOKENS = 200_000.0
"""Evidence beyond this is scaled down, so that a change of traffic shows within some hundred requests."""


def growth(before: float | None, after: float | None) -> float:
    """How much a counter grew; 0 where either side is unknown or the counter started anew."""
    return max(0.0, after - before) if before is not None and after is not None else 0.0


def computed_growth(before: EndpointMetrics, after: EndpointMetrics) -> float:
    """Prompt tokens that were computed, not served from the cache, between two scrapes."""
    prompt = growth(before.prompt_tokens, after.prompt_tokens)
    return max(0.0, prompt - growth(before.cached_prompt_tokens, after.cached_prompt_tokens))


def restarted(before: EndpointMetrics, after: EndpointMetrics) -> bool:
    """A counter went down: another process answers, and its cache is cold."""
    pairs = ((before.prompt_tokens, after.prompt_tokens), (before.prefix_queries, after.prefix_queries))
    return any(b is not None and a is not None and a < b for b, a in pairs)


class PrefillRate:
    """V: prompt tokens that one server computes in a second.

    Two estimates, both too low when their assumption fails, so the larger is taken: tokens over the requests' own prefill
    times (too low when several prefills share a step), and tokens over wall time while there was work all along
    (too low when there was not). A server counts a prompt only when its prefill ends, hence sums over a minute.
    """

    __slots__ = ("_busy_s", "_busy_tokens", "_request_s", "_request_tokens", "tokens_per_s")

    def __init__(self, *, start: float) -> None:
        self._request_tokens = start * _PRIOR_WEIGHT_S
        self._request_s = _PRIOR_WEIGHT_S
        self._busy_tokens = 0.0
        self._busy_s = 0.0
        self.tokens_per_s = start  # read for every candidate of every pick, changed once a scrape

    def observe(self, before: EndpointMetrics, after: EndpointMetrics, *, busy: bool) -> None:
        """Two scrapes in a row; busy: prompts waited to be computed all the time between them."""
        elapsed_s = after.scraped_at - before.scraped_at
        if elapsed_s <= 0:
            return
        keep = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        tokens = computed_growth(before, after)
        prefill_s = growth(before.prefill_sum_s, after.prefill_sum_s)
        if tokens > 0 and prefill_s > 0:
            self._request_tokens = self._request_tokens * keep + tokens
            self._request_s = self._request_s * keep + prefill_s
        if busy:
            self._busy_tokens = self._busy_tokens * keep + tokens
            self._busy_s = self._busy_s * keep + elapsed_s
        by_request = self._request_tokens / self._request_s
        by_wall = self._busy_tokens / self._busy_s if self._busy_s >= 1 else 0.0
        self.tokens_per_s = max(by_request, by_wall)


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
