"""Learns V, the prompt tokens that a server computes in a second, from the servers' own counters.

A part of the time to a first token does not depend on the prompt: the prefill waits for a step, and other
requests share the step. So tokens divided by time is too small wherever much of a prompt was cached.
Therefore a line is fitted over all servers of a model together:

    seconds to the first tokens = a * requests + tokens / V

by weighted least squares on the growth between scrapes. The tokens of a request include the tokens that were
ahead of it when it was sent. The answers that servers write meanwhile take a part of these times. So as soon
as some servers have always had prompts to compute between two pages, V is what these compute, and the line
only compares the servers. Without a common line, equal servers with different load would seem to differ, and
a server that seems fast would get more than its share. Each server has one factor for its own deviation (a
smaller GPU, a noisy neighbour): real seconds divided by predicted seconds, pulled towards 1 and forgotten
within minutes.

One server alone cannot move the line far: its numbers are ignored while it is off by more than
`MOST_SLOWNESS` times and most others are not. If most servers are off to one side, the line is wrong. Then
only these servers teach the line, and what it learned before counts less and less.
"""

from __future__ import annotations

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.learned import PRIOR_TOKENS, LeastSquares, computed_growth

_PRIOR_BUSY_TOKENS = 4000.0
"""The policy's rate counts as this many tokens, in addition to the tokens of servers that were busy all the
time.
"""
_KEEP_BUSY_S = 300.0
"""Older busy time is scaled down to this many seconds."""
_KEEP_REQUESTS = 2000.0
"""Older evidence is scaled down to this many requests, so that a change of hardware or traffic shows."""
MOST_SLOWNESS = 8.0
"""By how many times the real time of a prefill may differ from the predicted one."""


class ModelRate:
    """The line fitted over all servers of one model."""

    def __init__(self, *, start: float) -> None:
        """start: the rate of the policy."""
        self._fit = LeastSquares(2)
        self._counts = {-1: 0, 0: 0, 1: 0}
        """Number of servers by the side that they showed last."""
        self._requests = 0.0
        """Number of requests in the fit."""
        self._start = start
        self._busy_tokens = _PRIOR_BUSY_TOKENS
        self._busy_s = _PRIOR_BUSY_TOKENS / start
        self._line_tokens_per_s = start
        self.per_request_s = 0.0
        self.tokens_per_s = start

    def predicted_s(self, *, requests: float, tokens: float) -> float:
        """Return predicted seconds to some first tokens together."""
        return self.per_request_s * requests + tokens / self._line_tokens_per_s

    def observe(self, server: PrefillRate, *, requests: float, tokens: float, seconds: float) -> None:
        """Learn from tokens and seconds of some first tokens together, by the server's own counters."""
        predicted_s = self.predicted_s(requests=requests, tokens=tokens)
        side_seen = (seconds > MOST_SLOWNESS * predicted_s) - (MOST_SLOWNESS * seconds < predicted_s)
        self.leave(server)
        server.side = side_seen
        self._counts[side_seen] += 1
        if not self._learns_from(side_seen):
            return
        if side_seen:
            self._fit.scale(0.95)  # the line is wrong about most servers
        # The weight is 1 / requests, because the noise of a sum grows with the number of its terms.
        self._fit.add((requests, tokens), seconds, weight=1 / requests)
        self._requests += requests
        if self._requests > _KEEP_REQUESTS:
            self._fit.scale(_KEEP_REQUESTS / self._requests)
            self._requests = _KEEP_REQUESTS
        self._solve()

    def worked(self, *, tokens: float, seconds: float) -> None:
        """Take in the tokens of a server that always had prompts to compute."""
        self._busy_tokens += min(tokens, MOST_SLOWNESS * self._start * seconds)
        self._busy_s += seconds
        if self._busy_s > _KEEP_BUSY_S:
            self._busy_tokens *= _KEEP_BUSY_S / self._busy_s
            self._busy_s = _KEEP_BUSY_S
        self._sum_up()

    def leave(self, server: PrefillRate) -> None:
        """Forget a server that is gone or has another model now."""
        if server.side is not None:
            self._counts[server.side] -= 1
            server.side = None

    def _learns_from(self, side_seen: int) -> bool:
        """Return whether the line should learn from this observation: if most servers show the same, or if no
        server agrees with the line and there is no majority.
        """
        for side in (-1, 1):
            if 2 * self._counts[side] > sum(self._counts.values()):
                return side_seen == side
        return side_seen == 0 or not self._counts[0]

    def _solve(self) -> None:
        # The prior says that the constant part is 0, with the weight of 20 requests. If all prompts have one
        # length, the two parts cannot be distinguished, and the rate then explains the whole time.
        per_request, per_token = self._terms(20.0)
        # No coefficient may be negative.
        # If the constant part seems to explain everything, the slope is unknown.
        if per_request < 0 or per_token <= 0:
            per_request, per_token = 0.0, self._terms(1e12)[1]  # this weight leaves the constant part at 0
        if per_token > 0:
            self.per_request_s, self._line_tokens_per_s = per_request, 1 / per_token
            self._sum_up()

    def _terms(self, trust_requests: float) -> tuple[float, ...]:
        return self._fit.solve(prior=(0.0, 1 / self._start), trust=(trust_requests, PRIOR_TOKENS**2))

    def _sum_up(self) -> None:
        """Compute V: what busy servers compute. Until these are known, what first tokens show."""
        known = self._busy_tokens >= 2 * _PRIOR_BUSY_TOKENS or not self._requests
        self.tokens_per_s = self._busy_tokens / self._busy_s if known else self._line_tokens_per_s


class PrefillRate:
    """The prefill rate of one server (V)."""

    __slots__ = ("_busy_s", "_predicted_s", "_taken_s", "model", "side", "slowness")

    def __init__(self, model: ModelRate) -> None:
        self.model = model
        self.side: int | None = None
        """What its last first tokens took: far longer than predicted (1), far shorter (-1), or neither."""
        self._taken_s = 0.0
        self._predicted_s = 0.0
        """Seconds to first tokens, real and predicted, without the waits."""
        self._busy_s = 0.0
        """How long the server has been busy since its counter of prompt tokens last grew."""
        self.slowness = 1.0
        """Real seconds of this server for each second that its model's line predicts."""

    def began(self, *, requests: int, tokens: float, ahead_tokens: float, seconds: float) -> None:
        """Take in the times to the first tokens of some requests together. ahead_tokens: the tokens that the
        server had to compute before these first tokens, as estimated when the requests were sent. `tokens` of
        them belong to the requests' own prompts.
        """
        if not tokens or not seconds:
            return
        line = self.model
        # The line learns first. Otherwise, before it has learned anything,
        # the error of the policy's guess would count against the server that is read first.
        line.observe(self, requests=requests, tokens=ahead_tokens, seconds=seconds)
        predicted_s = line.predicted_s(requests=requests, tokens=ahead_tokens)
        # Several requests wait for the same prefill, so a wait counts only by the share of its own tokens.
        share = min(1.0, tokens / ahead_tokens)
        self._taken_s += share * min(seconds, MOST_SLOWNESS * predicted_s)
        self._predicted_s += share * predicted_s

    def observe(self, before: EndpointMetrics, after: EndpointMetrics, *, busy: bool) -> None:
        """Take in two scrapes in a row. busy: the server had prompts to compute all the time between them."""
        elapsed_s = after.scraped_at - before.scraped_at
        if elapsed_s <= 0:
            return
        keep = 0.5 ** (elapsed_s / 60.0)
        self._taken_s *= keep
        self._predicted_s *= keep
        # The prior says that a server is as fast as its model's others, with the weight of 3 seconds.
        ratio = (self._taken_s + 3.0) / (self._predicted_s + 3.0)
        ratio = max(ratio, 1 / MOST_SLOWNESS)  # `began` bounds the other side
        # The answers that servers write meanwhile cause small differences. Otherwise noise would decide among
        # equal servers, always in the same way.
        self.slowness = ratio if max(ratio, 1 / ratio) > 1.25 else 1.0
        self._busy_s = self._busy_s + elapsed_s if busy and after.cached_prompt_tokens is not None else 0.0
        if self._busy_s and (tokens := computed_growth(before, after)) > 0:
            self.model.worked(tokens=tokens, seconds=self._busy_s)
            self._busy_s = 0.0
