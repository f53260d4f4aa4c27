"""A policy that is tried: scores the same candidates as the policy in force, and only says what it would have picked.

Pure. It sees what the pick saw (endpoints, their state before the booking, what the table holds of the prompt) and cannot act:
bookings and the table follow the policy in force. So its chunks, scrapes and sampling are not tried, and candidates are
those of the policy in force. Both draw the same random numbers, so that two equal policies agree on every pick.
Called by `picker`, only while there is one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from epp.decision import WouldPick
from epp.endpoints.state import EndpointState
from epp.policy import Policy
from epp.scheduling.candidates import View, gate
from epp.scheduling.rules import RULES
from epp.types import EndpointName
from epp.views import apply_gain, view_of


class DryRun:
    """One policy being tried, and how often it agreed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._rng = random.Random()
        self._rule = RULES[policy.spec.rule](policy.spec, self._rng)
        self.picks = 0
        self.agreed = 0

    def follow(self, rng: random.Random) -> None:
        """Draw the numbers that `rng` is about to draw. Before the policy in force ranks."""
        self._rng.setstate(rng.getstate())

    def choose(
        self,
        states: Sequence[EndpointState],
        views: Sequence[View],
        *,
        chosen: EndpointName,
        prompt_tokens: int,
        adapter: str,
        session: str,
        now: float,
    ) -> WouldPick:
        """What it would pick, where the policy in force picks `chosen`. `views` are those of `states`, in the same order."""
        spec = self.policy.spec
        own = [
            view_of(state, view.cached_tokens, prompt_tokens, adapter=adapter, spec=spec, now=now)
            for state, view in zip(states, views, strict=True)
        ]
        apply_gain(own, prompt_tokens, spec.gain)
        gated = gate(own, spec=spec)
        name, reason = EndpointName(""), "saturated"
        if not (gated.saturated and spec.load.when_saturated == "Reject"):
            considered = gated.views if self._rule.gated else own
            ordered, ranked_by = self._rule.rank(considered, session=session, adapter=adapter)
            name = ordered[0].name
            reason = "saturated" if gated.saturated and self._rule.gated else ranked_by
        agrees = name == chosen
        self.picks += 1
        self.agreed += agrees
        return WouldPick(
            policy=self.policy.metadata.name, rule=spec.rule, chosen=name, reason=reason, agrees=agrees
        )

    def check_integrity(self) -> None:
        assert 0 <= self.agreed <= self.picks
