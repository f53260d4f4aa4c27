"""A policy that is tried: scores the same candidates as the policy in force, and only says what it would have picked.

Pure. It sees what the pick saw (endpoints, their state before the booking, what the table holds of the prompt) and cannot act:
bookings and the table follow the policy in force. So its chunks, scrapes and sampling are not tried, and candidates are
those of the policy in force. Both draw the same random numbers, so that two equal policies agree on every pick.
Called by `picker`, only while there is one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from epp.choosing import Chooser
from epp.decision import WouldPick
from epp.endpoints.state import EndpointState
from epp.errors import SaturatedError
from epp.policy import Policy
from epp.types import EndpointName
from epp.views import views_of


class DryRun:
    """One policy being tried, and how often it agreed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._rng = random.Random()
        self._chooser = Chooser(policy, self._rng)
        self.picks = 0
        self.agreed = 0

    def follow(self, rng: random.Random) -> None:
        """Draw the numbers that `rng` is about to draw. Before the policy in force ranks."""
        self._rng.setstate(rng.getstate())

    def choose(
        self,
        states: Sequence[EndpointState],
        cached: Mapping[EndpointName, int],
        *,
        chosen: EndpointName,
        prompt_tokens: int,
        adapter: str,
        session: str,
        now: float,
    ) -> WouldPick:
        """What it would pick of `states`, where the policy in force picks `chosen`. cached: tokens that they hold."""
        spec = self.policy.spec
        views = views_of(states, cached, prompt_tokens, adapter=adapter, spec=spec, now=now)
        try:
            ordered, reason = self._chooser.order(
                views, prompt_tokens=prompt_tokens, session=session, adapter=adapter
            )
            name = ordered[0].name
        except SaturatedError:
            name, reason = EndpointName(""), "saturated"
        agrees = name == chosen
        self.picks += 1
        self.agreed += agrees
        return WouldPick(
            policy=self.policy.metadata.name, rule=spec.rule, chosen=name, reason=reason, agrees=agrees
        )

    def check_integrity(self) -> None:
        assert 0 <= self.agreed <= self.picks
