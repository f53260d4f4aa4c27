"""Scores the candidates by a policy in dry run too, and only records what this policy would have picked.

Pure. A dry run sees what the pick saw: the endpoints, their state before the booking, and the chunks of the
prompt in the table. It cannot act, because bookings and the table follow the policy in use. So chunks,
scrapes and sampling of the tried policy have no effect, and the candidates are those of the policy in use.
Both policies draw the same random numbers, so two equal policies that have seen the same requests agree on
every pick. The predicted effect of another pick is for this one request, with the caches as the policy in use
fills them. If the tried policy had routed for a week, the caches would be different. `epp replay` simulates
this. `picker` calls this module only while there is a policy in dry run.
"""

import random
from functools import partial

from epp.base.errors import SaturatedError
from epp.base.types import EndpointName
from epp.config.policy import Policy
from epp.picker.decision import WouldPick
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import Scheduler
from epp.picker.scheduling.snapshot import SchedulingRequest, Snapshot


class DryRun:
    """A policy in dry run. Counts how often its picks agreed, and sums up what the other picks would have
    changed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._rng = random.Random()
        self.rule = RULES[policy.spec.rule](policy.spec, self._rng)
        """It remembers the requests that were sent since it began."""
        self._scheduler = Scheduler(policy.spec, self.rule)
        self.picks = 0
        self.agreed = 0
        self.refused = 0
        """Requests that this policy would have refused. They count in none of the numbers below."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Cached tokens at the picks of the policy in use."""
        self.more_cached_tokens = 0
        """Cached tokens at the picks of this policy, minus `cached_tokens`. May be negative."""
        self.more_s = 0.0
        """Seconds to the first token at the picks of this policy, minus those of the policy in use. May be
        negative."""

    def follow(self, rng: random.Random) -> None:
        """Draw the same numbers as `rng` will draw. Call this before the policy in use ranks."""
        self._rng.setstate(rng.getstate())

    def choose(self, request: SchedulingRequest, snapshot: Snapshot, *, place: int) -> WouldPick:
        """Return the pick of this policy. The policy in use picks the candidate at `place`. snapshot: the
        candidates, by the settings of this policy.
        """
        self.picks += 1
        would_pick = partial(WouldPick, policy=self.policy.metadata.name, rule=self.policy.spec.rule)
        try:
            choice = self._scheduler.schedule(request, snapshot)
        except SaturatedError:
            self.refused += 1
            return would_pick(chosen=EndpointName(""), reason="saturated", agrees=False)
        there, cached = choice.places[0], request.cached_tokens
        more_cached = round(float(cached[there] - cached[place]))
        wait_s = (snapshot.undone_tokens + request.prompt_tokens - cached) / snapshot.rate
        more_s = float(wait_s[there] - wait_s[place])
        self.agreed += there == place
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += round(float(cached[place]))
        self.more_cached_tokens += more_cached
        self.more_s += more_s
        return would_pick(
            chosen=snapshot.roster.names[snapshot.slots[there]],
            reason=choice.reason,
            agrees=there == place,
            more_cached_tokens=more_cached,
            more_s=round(more_s, 6),
        )
