"""Learns how many tokens a prompt of a model makes, from sampled answers of all of its servers, and from
their counters. Streamed answers state no usage unless the client asks for it, so the counters may be all
there is.

The prefill rate is not here, since servers differ in it (`prefill_rate`). Pure arithmetic. A pick only reads
`TokenEstimate.terms`.
"""

from dataclasses import dataclass

import numpy as np

from epp.base.types import EndpointMetrics, PromptSize
from epp.picker.scheduling.snapshot import Floats

Terms = tuple[float, ...]

PRIOR_TOKENS = 500.0
"""What the policy says counts as much as this many tokens, so a few real requests outweigh it."""
_KEEP_TOKENS = 200_000.0
"""Older samples together count as this many tokens at most, so that a change of traffic shows within some
hundred requests.
"""
_ENOUGH = 20
"""A window of counters has so many requests, and so many for each that was in flight at its edges, where the
two sides count differently.
"""
MOST_BYTES_PER_TOKEN = 64.0


def growth(before: float | None, after: float | None) -> float:
    """Return how much a counter grew. 0: one of the values is unknown, or the counter has started again."""
    return max(0.0, after - before) if before is not None and after is not None else 0.0


def computed_growth(before: EndpointMetrics, after: EndpointMetrics) -> float:
    """Return prompt tokens computed between two scrapes, without those that came from the cache."""
    prompt = growth(before.prompt_tokens, after.prompt_tokens)
    return max(0.0, prompt - growth(before.cached_prompt_tokens, after.cached_prompt_tokens))


def restarted(before: EndpointMetrics, after: EndpointMetrics) -> bool:
    """Return whether a counter went down. Then another process with a cold cache answers now."""
    pairs = ((before.prompt_tokens, after.prompt_tokens), (before.prefix_queries, after.prefix_queries))
    return any(b is not None and a is not None and a < b for b, a in pairs)


class LeastSquares:
    """Fits value = a * x + b * y + ... to samples, by sums that forget old samples. A prior makes the
    equations solvable.
    """

    __slots__ = ("_products", "_values")

    def __init__(self, terms: int) -> None:
        """terms: the number of coefficients."""
        self._products: Floats = np.zeros((terms, terms))
        self._values: Floats = np.zeros(terms)
        """The products of the terms with the values."""

    def add(self, terms: Terms, value: float, *, weight: float) -> None:
        row = np.array(terms)
        self._products += weight * np.outer(row, row)
        self._values += weight * value * row

    def scale(self, keep: float) -> None:
        """Reduce the weight of all samples so far."""
        self._products *= keep
        self._values *= keep

    def solve(self, *, prior: Terms, trust: Terms) -> Terms:
        """Return the coefficients, each pulled to its prior with a weight above 0 in the unit of its
        squares.
        """
        try:
            solved = np.linalg.solve(
                self._products + np.diag(trust), self._values + np.multiply(trust, prior)
            )
        except np.linalg.LinAlgError:  # only rounding can cause this, since the matrix is positive definite
            return prior
        return tuple(solved.tolist())


@dataclass(slots=True, eq=False)
class CounterWindow:
    """Our own requests that one server has finished since a page, to compare them with its counters."""

    start: EndpointMetrics | None = None
    own: int = 0
    size: PromptSize = PromptSize(0)  # noqa: RUF009 - frozen
    """The sizes of these prompts together."""

    def add(self, size: PromptSize) -> None:
        self.own, self.size = self.own + 1, self.size + size

    def sample(self, after: EndpointMetrics) -> tuple[PromptSize, float] | None:
        """Return size and tokens of the window's requests, if it closes with this page. A window teaches
        only if the server finished about as many requests as we sent there. Otherwise the requests of other
        clients or replicas would be taken for ours.
        """
        start = self.start
        if start is None or after.inside is None or after.finished is None:
            self._open(after)
            return None
        if self.own < _ENOUGH * max(1, (start.inside or 0) + after.inside):
            return None
        ours = abs(growth(start.finished, after.finished) - self.own) <= self.own / _ENOUGH
        sample = (self.size, growth(start.prompt_tokens, after.prompt_tokens))
        self._open(after)
        return sample if ours else None

    def _open(self, page: EndpointMetrics) -> None:
        self.start = page if page.inside is not None and page.finished is not None else None
        self.own, self.size = 0, PromptSize(0)


class TokenEstimate:
    """Estimates the tokens of a prompt without a tokenizer, for one model. Sizes are those of canonical
    prompts.

        tokens = a * bytes + b * bytes that continue a letter beyond ASCII
            + c * guessed tokens of pictures + d * of sound + e * of films + f * of texts + g * of others

    The seven factors are fitted by weighted least squares with sums that forget old samples, so a single odd
    sample cannot change the estimate much. The estimate starts with the bytes per token of the policy. The
    mean of bytes per token over all traffic is kept too: it converts the size of a cache from tokens to bytes
    of prompts.
    """

    __slots__ = ("_bytes", "_fit", "_prior", "_tokens", "_trust", "terms")

    def __init__(self, *, start: float) -> None:
        self._tokens = PRIOR_TOKENS
        self._bytes = start * PRIOR_TOKENS
        self._prior = (1 / start, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)
        # The guess is weakly believed: one request with a picture of 1,000 tokens has five times the weight.
        self._trust = (self._bytes, self._bytes / 100, 50.0, 50.0, 50.0, 50.0, 50.0)
        self._fit = LeastSquares(len(self._prior))
        self.terms: Terms = self._prior
        """The factors a to g."""

    @property
    def bytes_per_token(self) -> float:
        """The mean bytes per token over everything that was learned."""
        return self._bytes / self._tokens

    def learn(self, size: PromptSize, tokens: float) -> None:
        """Learn from the size of a prompt, or of several together, and the tokens that a server counted.
        Impossible samples are ignored, since all servers share this estimate.
        """
        # A tokenizer makes at most one token of a byte, and a chat template adds some. A film may be long.
        guessed = sum(size.media)
        most = 2.0 * size.text_bytes + 200.0 * guessed
        if size.text_bytes <= 0 or not max(1.0, size.text_bytes / MOST_BYTES_PER_TOKEN) <= tokens <= most:
            return
        self._bytes += size.text_bytes
        self._tokens += tokens
        # The estimate's error grows with the prompt, so a few large prompts must not outweigh the rest. A
        # guessed token is about as uncertain as those of two bytes.
        weight = 1 / (size.text_bytes + 2 * guessed)
        self._fit.add((size.text_bytes, size.continuation_bytes, *size.media), tokens, weight=weight)
        if self._tokens > _KEEP_TOKENS:
            scale = _KEEP_TOKENS / self._tokens
            self._bytes *= scale
            self._tokens *= scale
            self._fit.scale(scale)
        self.terms = self._fit.solve(prior=self._prior, trust=self._trust)
