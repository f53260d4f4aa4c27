"""V: prompt tokens that a server computes in a second, learned from the servers' own counters.

A part of the time of a prefill does not depend on its length: it waits for a step, and other requests share
the step. So tokens divided by time is too small wherever much of a prompt was cached. Therefore a line is
fitted over all servers of a model together:

    prefill seconds = a * requests + tokens / V + T * adapters loaded

by weighted least squares on the growth between scrapes. Without a common line, equal servers with different
load would seem to differ, and a server that seems fast would get more than its share. Each server has one
factor for its own deviation (a smaller GPU, a noisy neighbour): real seconds divided by predicted seconds,
pulled towards 1 and forgotten within minutes.

One server alone cannot move the line far: its numbers are ignored while it is off by more than
`_MOST_SLOWNESS` times and most others are not. If most servers are off to one side, the line is wrong. Then
only these servers teach the line, and what it learned before counts less and less.

Matching pairs of tokens and seconds come from histograms that the server fills when a request ends
(`request_prefill_kv_computed_tokens` and `request_prefill_time_seconds` of vLLM). A server without them keeps
its model's rate.

The first requests end after their answers, which may take half a minute. Until then the rate comes from the
counters of prompt tokens, from times when servers always had prompts to compute. A server's own factor starts
in the same way: from how the server then compares with its model's other busy servers.
"""

from __future__ import annotations

from epp.endpoints.growth import computed_growth, growth
from epp.endpoints.least_squares import Three, ThreeTerms
from epp.types import EndpointMetrics

_PRIOR_TOKENS = 500.0
"""The policy's rate counts as one prefill of so many tokens: soon outweighed."""
_PRIOR_REQUESTS = 20.0
"""The constant part starts as nothing, with the weight of so many requests: where prompts are all of one
length and the two cannot be told apart, it is the rate that explains their time."""
_PRIOR_LOADS = 1.0
"""The prior says that adapter loads take no time, with the weight of one load."""
_NAILED = 1e12
"""A weight that leaves a coefficient at its prior."""
_PRIOR_BUSY_TOKENS = 4000.0
"""The policy's rate counts as so many tokens beside those of servers that were busy all the time."""
_KEEP_BUSY = 0.99
"""Of what the busy servers together have shown, at each new observation."""
_OWN_TIMES_S = 10.0
"""With prefill times of so many seconds a server's factor needs no comparison of busy servers any more."""
_UNLIKE = 1.25
"""Busy servers that differ by less count as alike: what answers they write meanwhile makes as much."""
_KEEP_REQUESTS = 2000.0
"""Evidence beyond this is scaled down, so that a change of hardware or traffic shows."""
_OWN_PRIOR_S = 3.0
"""The prior says that a server is as fast as its model's others, with the weight of this many seconds of
prefill."""
_OWN_HALF_LIFE_S = 60.0
_LEAST_S = 1e-9
"""Least predicted time of a prefill, because a counter may grow by almost nothing."""
_MOST_SLOWNESS = 8.0
_KEEP_WRONG = 0.95
"""Of what a line was taught that is wrong about most servers, at each new observation."""


class ModelRate:
    """The line fitted over all servers of one model."""

    __slots__ = (
        "_busy_foretold_s", "_busy_s", "_busy_taken_s", "_busy_tokens", "_counts", "_fit", "_guess", "_requests", "_said", "_start",
        "per_load_s", "per_request_s", "tokens_per_s",
    )  # fmt: skip

    def __init__(self, *, start: float) -> None:
        self._fit = ThreeTerms()
        self._said: dict[PrefillRate, int] = {}
        """By server, of its last observation:
        it took far longer than foretold (1), far shorter (-1), or neither (0)."""
        self._counts = {-1: 0, 0: 0, 1: 0}
        """Servers by what they said last."""
        self._requests = 0.0
        """In the fit."""
        self._guess = start
        """The policy's rate."""
        self._start = start
        """What the fit begins with."""
        self._busy_tokens = _PRIOR_BUSY_TOKENS
        self._busy_s = _PRIOR_BUSY_TOKENS / start
        self._busy_taken_s = self._busy_foretold_s = 1.0
        self.per_request_s = 0.0
        self.per_load_s = 0.0
        """What a request takes longer whose adapter is loaded for it."""
        self.tokens_per_s = start

    def foretold_s(self, *, requests: float, tokens: float, adapter_loads: int) -> float:
        """Predicted seconds of some prefills together."""
        return self.per_request_s * requests + tokens / self.tokens_per_s + self.per_load_s * adapter_loads

    def observe(
        self, server: PrefillRate, *, requests: float, tokens: float, seconds: float, adapter_loads: int = 0
    ) -> None:
        """What the prefills of some requests came to, together, by the server's own account."""
        foretold_s = self.foretold_s(requests=requests, tokens=tokens, adapter_loads=adapter_loads)
        ratio = seconds / max(foretold_s, _LEAST_S)
        says = (ratio > _MOST_SLOWNESS) - (ratio < 1 / _MOST_SLOWNESS)
        self.leave(server)
        self._said[server] = says
        self._counts[says] += 1
        if not self._heeds(says):
            return
        if says:
            self._fit.scale(_KEEP_WRONG)
        # Weighted by 1 / requests: the noise of a sum grows with what it sums.
        self._fit.add((requests, tokens, float(adapter_loads)), seconds, weight=1 / requests)
        self._requests += requests
        if self._requests > _KEEP_REQUESTS:
            self._fit.scale(_KEEP_REQUESTS / self._requests)
            self._requests = _KEEP_REQUESTS
        self._solve()

    @property
    def busy_slowness(self) -> float:
        """Seconds that busy servers take for what the line foretells as one: they write answers meanwhile."""
        return self._busy_taken_s / self._busy_foretold_s

    def worked(self, *, tokens: float, seconds: float) -> None:
        """A server computed so much while it had prompts to compute all the time.
        It moves the rate until the time of a prefill is known.
        """
        if not self._requests:
            self._busy_tokens += min(tokens, _MOST_SLOWNESS * self._guess * seconds)
            self._busy_s += seconds
            self._start = self.tokens_per_s = self._busy_tokens / self._busy_s
        foretold_s = min(tokens / self.tokens_per_s, _MOST_SLOWNESS * seconds)
        self._busy_taken_s = _KEEP_BUSY * self._busy_taken_s + seconds
        self._busy_foretold_s = _KEEP_BUSY * self._busy_foretold_s + foretold_s

    def leave(self, server: PrefillRate) -> None:
        """Forget a server that is gone or that has another model now."""
        if server in self._said:
            self._counts[self._said.pop(server)] -= 1

    def _heeds(self, says: int) -> bool:
        """Whether most servers say the same, or none agrees with the line and they do not agree with one
        another.
        """
        for side in (-1, 1):
            if 2 * self._counts[side] > len(self._said):
                return says == side
        return says == 0 or not self._counts[0]

    def _solve(self) -> None:
        per_request, per_token, per_load = self._terms(_PRIOR_REQUESTS, _PRIOR_LOADS)
        # Nothing takes less than no time.
        # And where the constant part seems to explain everything, no slope can be told.
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


class PrefillRate:
    """One server's V."""

    __slots__ = (
        "_busy_s", "_foretold_s", "_taken_s", "_worked_foretold_s", "_worked_s", "model", "slowness",
    )  # fmt: skip

    def __init__(self, model: ModelRate) -> None:
        self.model = model
        self._taken_s = 0.0
        self._foretold_s = 0.0
        self._worked_s = 0.0
        self._worked_foretold_s = 0.0
        """While it was busy all the time."""
        self._busy_s = 0.0
        """How long it has had prompts to compute, since its counter of prompt tokens last grew."""
        self.slowness = 1.0
        """Seconds this server takes for what its model's line foretells as one."""

    @property
    def tokens_per_s(self) -> float:
        return self.model.tokens_per_s / self.slowness

    def observe(self, before: EndpointMetrics, after: EndpointMetrics, *, adapter_loads: int = 0) -> None:
        """Two scrapes of this server in a row. adapter_loads: of requests that ended between them."""
        elapsed_s = after.scraped_at - before.scraped_at
        if elapsed_s <= 0:
            return
        keep = 0.5 ** (elapsed_s / _OWN_HALF_LIFE_S)
        self._taken_s *= keep
        self._foretold_s *= keep
        self._worked_s *= keep
        self._worked_foretold_s *= keep
        requests = growth(before.prefill_count, after.prefill_count)
        tokens = growth(before.prefill_tokens, after.prefill_tokens)
        seconds = growth(before.prefill_sum_s, after.prefill_sum_s)
        if requests >= 1 and tokens > 0 and seconds > 0:
            self._learn(requests=requests, tokens=tokens, seconds=seconds, adapter_loads=adapter_loads)
        self._sum_up()

    def _sum_up(self) -> None:
        """The factor, by the times of its prefills, and while these are few by how busy servers compare."""
        worked_s, foretold_s = self._worked_s / self.model.busy_slowness, self._worked_foretold_s
        ratio = (worked_s + _OWN_PRIOR_S) / (foretold_s + _OWN_PRIOR_S)
        trust = max(0.0, 1 - self._foretold_s / _OWN_TIMES_S) if max(ratio, 1 / ratio) > _UNLIKE else 0.0
        taken_s = self._taken_s + trust * worked_s
        foretold_s = self._foretold_s + trust * foretold_s
        ratio = (taken_s + _OWN_PRIOR_S) / (foretold_s + _OWN_PRIOR_S)
        self.slowness = min(max(ratio, 1 / _MOST_SLOWNESS), _MOST_SLOWNESS)

    def _learn(self, *, requests: float, tokens: float, seconds: float, adapter_loads: int) -> None:
        model = self.model
        # The line first: before it has learned anything,
        # the policy's guess would be blamed on whoever is read first.
        model.observe(self, requests=requests, tokens=tokens, seconds=seconds, adapter_loads=adapter_loads)
        self._taken_s += seconds
        self._foretold_s += model.foretold_s(requests=requests, tokens=tokens, adapter_loads=adapter_loads)

    def worked(self, before: EndpointMetrics, after: EndpointMetrics, *, busy: bool) -> None:
        """Two scrapes in a row. busy: it had prompts to compute all the time between them."""
        if not busy or after.cached_prompt_tokens is None:
            self._busy_s = 0.0
            return
        self._busy_s += max(0.0, after.scraped_at - before.scraped_at)
        tokens = computed_growth(before, after)
        if tokens > 0:
            # The rate first, as in `_learn`. A counter that leaps says nothing of one server's speed.
            self.model.worked(tokens=tokens, seconds=self._busy_s)
            foretold_s = tokens / self.model.tokens_per_s
            self._worked_s += self._busy_s
            self._worked_foretold_s += min(foretold_s, _MOST_SLOWNESS * self._busy_s)
            self._busy_s = 0.0
            self._sum_up()

    def leave(self) -> None:
        """The server is gone, or has another model."""
        self.model.leave(self)
