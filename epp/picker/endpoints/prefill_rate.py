"""Learns V, the prompt tokens that a server computes in a second, from the servers' own counters.

A part of the time of a prefill does not depend on its length: the prefill waits for a step, and other
requests share the step. So tokens divided by time is too small wherever much of a prompt was cached.
Therefore a line is fitted over all servers of a model together:

    prefill seconds = a * requests + tokens / V + T * adapters loaded

by weighted least squares on the growth between scrapes. Without a common line, equal servers with different
load would seem to differ, and a server that seems fast would get more than its share. Each server has one
factor for its own deviation (a smaller GPU, a noisy neighbour): real seconds divided by predicted seconds,
pulled towards 1 and forgotten within minutes.

One server alone cannot move the line far: its numbers are ignored while it is off by more than
`_MOST_SLOWNESS` times and most others are not. If most servers are off to one side, the line is wrong. Then
only these servers teach the line, and what it learned before counts less and less.

Matching pairs of tokens and seconds come from histograms that the server fills when a request ends
(`request_prefill_kv_computed_tokens` and `request_prefill_time_seconds` of vLLM). A server without them has
its model's rate, times the factor that its times to first tokens show.

The first requests end after their answers, which may take half a minute. Until then the rate comes from the
counters of prompt tokens, from times when servers always had prompts to compute. A server's own factor starts
from its times to first tokens. A second line is fitted over these times. In this fit, the tokens of a request
include the tokens that were ahead of it. The second line serves only to compare the servers, since the
answers that they write take a part of these times.
"""

from __future__ import annotations

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.growth import computed_growth, growth
from epp.picker.endpoints.learned import Three, ThreeTerms

_PRIOR_TOKENS = 500.0
"""The policy's rate counts as one prefill of this many tokens, so a few real prefills outweigh it."""
_PRIOR_REQUESTS = 20.0
"""The prior says that the constant part is 0, with the weight of this many requests. If all prompts have one
length, the two parts cannot be distinguished, and the rate then explains the whole time.
"""
_PRIOR_LOADS = 1.0
"""The prior says that adapter loads take no time, with the weight of one load."""
_NAILED = 1e12
"""A weight that leaves a coefficient at its prior."""
_PRIOR_BUSY_TOKENS = 4000.0
"""The policy's rate counts as this many tokens, in addition to the tokens of servers that were busy all the
time.
"""
_OWN_TIMES_S = 10.0
"""With this many seconds of prefill times, a server's factor no longer uses its times to first tokens."""
_UNLIKE = 1.25
"""Servers whose times to first tokens differ by a smaller factor count as equal, since the answers that they
write meanwhile cause such differences."""
_KEEP_REQUESTS = 2000.0
"""Older evidence is scaled down to this many requests, so that a change of hardware or traffic shows."""
_OWN_PRIOR_S = 3.0
"""The prior says that a server is as fast as its model's others, with the weight of this many seconds of
prefill."""
_OWN_HALF_LIFE_S = 60.0
_ALIKE = 1.05
"""A server whose factor is nearer to 1 than this counts as equal to the others of its model: one minute of
prefill times does not tell more. Otherwise noise would decide among equal servers, always in the same way.
"""
_MOST_SLOWNESS = 8.0
_KEEP_WRONG = 0.95
"""Weight of the line's earlier observations at each new one, while the line is wrong about most servers."""


class Line:
    """The line fitted over all servers of one model."""

    __slots__ = (
        "_counts",
        "_fit",
        "_observed",
        "_requests",
        "_start",
        "per_load_s",
        "per_request_s",
        "tokens_per_s",
    )

    def __init__(self, *, start: float) -> None:
        """Begin the fit at the rate `start`."""
        self._fit = ThreeTerms()
        self._observed: dict[PrefillRate, int] = {}
        """The last observation of each server: its prefills took far longer than predicted (1), far shorter
        (-1), or neither (0)."""
        self._counts = {-1: 0, 0: 0, 1: 0}
        """Number of servers by their last observation."""
        self._requests = 0.0
        """Number of requests in the fit."""
        self._start = start
        self.per_request_s = 0.0
        self.per_load_s = 0.0
        """Extra seconds of a request whose adapter has to be loaded first."""
        self.tokens_per_s = start

    def predicted_s(self, *, requests: float, tokens: float, adapter_loads: int) -> float:
        """Return predicted seconds of some prefills together."""
        return self.per_request_s * requests + tokens / self.tokens_per_s + self.per_load_s * adapter_loads

    def observe(
        self, server: PrefillRate, *, requests: float, tokens: float, seconds: float, adapter_loads: int = 0
    ) -> None:
        """Learn from tokens and seconds of some prefills together, by the server's own counters."""
        predicted_s = self.predicted_s(requests=requests, tokens=tokens, adapter_loads=adapter_loads)
        side_seen = (seconds > _MOST_SLOWNESS * predicted_s) - (_MOST_SLOWNESS * seconds < predicted_s)
        self.leave(server)
        self._observed[server] = side_seen
        self._counts[side_seen] += 1
        if not self._learns_from(side_seen):
            return
        if side_seen:
            self._fit.scale(_KEEP_WRONG)
        # The weight is 1 / requests, because the noise of a sum grows with the number of its terms.
        self._fit.add((requests, tokens, float(adapter_loads)), seconds, weight=1 / requests)
        self._requests += requests
        if self._requests > _KEEP_REQUESTS:
            self._fit.scale(_KEEP_REQUESTS / self._requests)
            self._requests = _KEEP_REQUESTS
        self._solve()

    def leave(self, server: PrefillRate) -> None:
        """Forget a server that is gone or has another model now."""
        if server in self._observed:
            self._counts[self._observed.pop(server)] -= 1

    def _learns_from(self, side_seen: int) -> bool:
        """Return whether the line should learn from this observation: if most servers show the same, or if no
        server agrees with the line and there is no majority.
        """
        for side in (-1, 1):
            if 2 * self._counts[side] > len(self._observed):
                return side_seen == side
        return side_seen == 0 or not self._counts[0]

    def _solve(self) -> None:
        per_request, per_token, per_load = self._terms(_PRIOR_REQUESTS, _PRIOR_LOADS)
        # No coefficient may be negative.
        # If the constant part seems to explain everything, the slope is unknown.
        if per_load < 0:
            per_load = 0.0
            per_request, per_token, _ = self._terms(_PRIOR_REQUESTS, _NAILED)
        if per_request < 0 or per_token <= 0:
            per_request = 0.0
            _, per_token, per_load = self._terms(_NAILED, _PRIOR_LOADS if per_load > 0 else _NAILED)
        if per_token > 0:
            self.per_request_s, self.tokens_per_s, self.per_load_s = (
                per_request,
                1 / per_token,
                max(0.0, per_load),
            )

    def _terms(self, trust_requests: float, trust_loads: float) -> Three:
        trust = (trust_requests, _PRIOR_TOKENS**2, trust_loads)
        return self._fit.solve(prior=(0.0, 1 / self._start, 0.0), trust=trust)


class ModelRate(Line):
    """The time that prefills of one model take, and the line that compares its servers while few requests
    have ended.
    """

    __slots__ = ("_busy_s", "_busy_tokens", "_guess", "first_tokens")

    def __init__(self, *, start: float) -> None:
        super().__init__(start=start)
        self._guess = start
        """The policy's rate."""
        self._busy_tokens = _PRIOR_BUSY_TOKENS
        self._busy_s = _PRIOR_BUSY_TOKENS / start
        self.first_tokens = Line(start=start)
        """The line of times to first tokens."""

    def worked(self, *, tokens: float, seconds: float) -> None:
        """Move the rate by the tokens of a server that always had prompts to compute, until prefill times are
        known.
        """
        if not self._requests:
            self._busy_tokens += min(tokens, _MOST_SLOWNESS * self._guess * seconds)
            self._busy_s += seconds
            self._start = self.tokens_per_s = self._busy_tokens / self._busy_s


class PrefillRate:
    """The prefill rate of one server (V)."""

    __slots__ = (
        "_busy_s", "_first_predicted_s", "_first_s", "_predicted_s", "_taken_s", "model", "slowness",
    )  # fmt: skip

    def __init__(self, model: ModelRate) -> None:
        self.model = model
        self._taken_s = 0.0
        self._predicted_s = 0.0
        self._first_s = 0.0
        self._first_predicted_s = 0.0
        """Seconds to first tokens, real and predicted, without the waits."""
        self._busy_s = 0.0
        """How long the server has been busy since its counter of prompt tokens last grew."""
        self.slowness = 1.0
        """Real seconds of this server for each second that its model's line predicts."""

    def observe(self, before: EndpointMetrics, after: EndpointMetrics, *, adapter_loads: int = 0) -> None:
        """Take in two scrapes of this server in a row.
        adapter_loads: adapters loaded for the requests that ended between them.
        """
        elapsed_s = after.scraped_at - before.scraped_at
        if elapsed_s <= 0:
            return
        keep = 0.5 ** (elapsed_s / _OWN_HALF_LIFE_S)
        self._taken_s *= keep
        self._predicted_s *= keep
        self._first_s *= keep
        self._first_predicted_s *= keep
        requests = growth(before.prefill_count, after.prefill_count)
        tokens = growth(before.prefill_tokens, after.prefill_tokens)
        seconds = growth(before.prefill_sum_s, after.prefill_sum_s)
        if requests >= 1 and tokens > 0 and seconds > 0:
            self._learn(requests=requests, tokens=tokens, seconds=seconds, adapter_loads=adapter_loads)
        self._sum_up()

    def _sum_up(self) -> None:
        """Compute the factor from the server's prefill times and, while these are few, from its times to
        first tokens.
        """
        ratio = (self._first_s + _OWN_PRIOR_S) / (self._first_predicted_s + _OWN_PRIOR_S)
        trust = max(0.0, 1 - self._predicted_s / _OWN_TIMES_S) if max(ratio, 1 / ratio) > _UNLIKE else 0.0
        taken_s = self._taken_s + trust * self._first_s
        predicted_s = self._predicted_s + trust * self._first_predicted_s
        ratio = (taken_s + _OWN_PRIOR_S) / (predicted_s + _OWN_PRIOR_S)
        ratio = min(max(ratio, 1 / _MOST_SLOWNESS), _MOST_SLOWNESS)
        self.slowness = ratio if max(ratio, 1 / ratio) > _ALIKE else 1.0

    def _learn(self, *, requests: float, tokens: float, seconds: float, adapter_loads: int) -> None:
        model = self.model
        # The line learns first. Otherwise, before it has learned anything,
        # the error of the policy's guess would count against the server that is read first.
        model.observe(self, requests=requests, tokens=tokens, seconds=seconds, adapter_loads=adapter_loads)
        self._taken_s += seconds
        self._predicted_s += model.predicted_s(requests=requests, tokens=tokens, adapter_loads=adapter_loads)

    def began(self, *, requests: int, tokens: float, ahead_tokens: float, seconds: float) -> None:
        """Take in the times to the first tokens of some requests together. ahead_tokens: the tokens that the
        server had to compute before these first tokens, as estimated when the requests were sent. `tokens` of
        them belong to the requests' own prompts.
        """
        if not tokens or not seconds:
            return
        line = self.model.first_tokens
        line.observe(self, requests=requests, tokens=ahead_tokens, seconds=seconds)
        predicted_s = line.predicted_s(requests=requests, tokens=ahead_tokens, adapter_loads=0)
        # Several requests wait for the same prefill, so a wait counts only by the share of its own tokens.
        share = min(1.0, tokens / ahead_tokens)
        self._first_s += share * min(seconds, _MOST_SLOWNESS * predicted_s)
        self._first_predicted_s += share * predicted_s
        self._sum_up()

    def worked(self, before: EndpointMetrics, after: EndpointMetrics, *, busy: bool) -> None:
        """Take in two scrapes in a row. busy: the server had prompts to compute all the time between them."""
        if not busy or after.cached_prompt_tokens is None:
            self._busy_s = 0.0
            return
        self._busy_s += max(0.0, after.scraped_at - before.scraped_at)
        tokens = computed_growth(before, after)
        if tokens > 0:
            self.model.worked(tokens=tokens, seconds=self._busy_s)
            self._busy_s = 0.0

    def leave(self) -> None:
        """Leave the model's lines, because the server is gone or has another model now."""
        self.model.leave(self)
        self.model.first_tokens.leave(self)
