"""The candidates of a decision as people see them, made from the choice when somebody reads the decision."""

from collections.abc import Iterator
from math import isnan
from typing import Any

from msgspec import Struct

from epp.config.policy import PolicySpec
from epp.picker.decision import Candidate
from epp.picker.scheduling.least_cost import cost_parts_s
from epp.picker.scheduling.schedule import Choice


class ShownCandidates(Struct, frozen=True, eq=False, gc=False):
    """The best candidates, best first, formatted when they are read, since people read few decisions."""

    choice: Choice
    """If there are many candidates, only among the best ones."""
    spec: PolicySpec
    best_cached_tokens: int
    """The most tokens of the prompt that any candidate held, whether it is shown or not."""

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._candidate, self.choice.places)

    def _candidate(self, place: int) -> Candidate:
        choice, weighed, seen = self.choice, self.choice.weighed, self.choice.weighed.seen
        columns = (
            weighed.request.cached_tokens,
            weighed.uncached_tokens,
            seen.undone_tokens,
            seen.in_flight,
            seen.waiting,
            seen.kv_usage,
            seen.rate,
            choice.score_s,
            weighed.load_s,
            seen.failure_share,
        )
        numbers: list[Any] = [None if column is None else column[place].item() for column in columns]
        cached, uncached, undone, in_flight, waiting, kv_usage, rate, score_s, load_s, share = numbers
        tokens = weighed.request.prompt_tokens
        parts_s = cost_parts_s(undone, uncached, tokens, in_flight, rate, load_s=load_s, cost=self.spec.cost)
        parts_s["failing"] = self.spec.failures.cost_seconds * (share or 0.0)
        if score_s is not None and not isnan(score_s):
            # Others pay a part of the tokens of a further copy: of their prefill and of what it stalls alike.
            spared_s, weight = sum(parts_s.values()) - score_s, self.spec.cost.uncached_token_weight
            each_s = weight + self.spec.cost.stalled_request_weight * in_flight
            of_prefill_s = spared_s * weight / each_s if each_s else 0.0
            parts_s["prefill"] -= of_prefill_s
            parts_s["stall"] -= spared_s - of_prefill_s
        slot = seen.slots[place]
        return Candidate(
            name=seen.roster.names[slot],
            address=seen.roster.addresses[slot],
            matched_tokens=int(cached),
            uncached_tokens=int(uncached),
            backlog_tokens=int(undone),
            in_flight=int(in_flight),
            waiting=None if isnan(waiting) else int(waiting),
            kv_usage=None if isnan(kv_usage) else kv_usage,
            prefill_tokens_per_s=rate,
            score_s=0.0 if score_s is None or isnan(score_s) else score_s,
            parts_s=parts_s,
            excluded=choice.why_excluded(place),
        )
