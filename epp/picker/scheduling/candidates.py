"""The candidates of a decision as people see them, made from the choice when somebody reads the decision."""

from collections.abc import Iterator
from math import isnan, nan
from typing import Any

from msgspec import Struct

from epp.config.policy import PolicySpec
from epp.picker.decision import Candidate
from epp.picker.scheduling.least_cost import delayed, prefill_s
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
        values = [nan if column is None else column[place].item() for column in columns]
        numbers: list[Any] = [None if isnan(value) else value for value in values]
        cached, uncached, undone, in_flight, waiting, kv_usage, rate, score_s, load_s, share = numbers
        failing_s = self.spec.failures.cost_seconds * (share or 0.0)
        wait_s, load_s = undone / rate, load_s or 0.0
        weight, stall = self.spec.cost.uncached_token_weight, self.spec.cost.stalled_request_weight
        others_s = float(delayed(wait_s, in_flight, stall=stall, arrivals_per_s=choice.arrivals_per_s))
        own_s: float = prefill_s(uncached, weighed.request.prompt_tokens, rate)
        if score_s is not None and weight + others_s:
            # This is less than the whole prefill if others pay a part of a further copy.
            own_s = (score_s - failing_s - wait_s) / (weight + others_s) - load_s
        slot = seen.slots[place]
        return Candidate(
            name=seen.roster.names[slot],
            address=seen.roster.addresses[slot],
            matched_tokens=int(cached),
            uncached_tokens=int(uncached),
            backlog_tokens=int(undone),
            in_flight=int(in_flight),
            waiting=None if waiting is None else int(waiting),
            kv_usage=kv_usage,
            prefill_tokens_per_s=rate,
            score_s=score_s or 0.0,
            parts_s={
                "backlog": wait_s,
                "prefill": own_s * weight,
                "stall": (own_s + load_s) * others_s,
                "lora": load_s * weight,
                "failing": failing_s,
            },
            excluded=choice.why_excluded(place),
        )
