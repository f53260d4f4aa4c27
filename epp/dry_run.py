"""A policy that is tried: scores the same candidates as the policy in force, and only says what it would have picked.

Pure. It sees what the pick saw (endpoints, their state before the booking, what the table holds of the prompt) and cannot act:
bookings and the table follow the policy in force. So its chunks, scrapes and sampling are not tried, and candidates are
those of the policy in force. Both draw the same random numbers, so that two equal policies agree on every pick.
Called by `picker`, only while there is one.
"""

from __future__ import annotations

import random

from epp.config.policy import Policy
from epp.decision import WouldPick
from epp.errors import SaturatedError
from epp.scheduling.schedule import Request, Scheduler
from epp.scheduling.snapshot import Snapshot
from epp.types import EndpointName


class DryRun:
    """One policy being tried, and how often it agreed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._rng = random.Random()
        self._scheduler = Scheduler(policy.spec, self._rng)
        self.picks = 0
        self.agreed = 0

    def follow(self, rng: random.Random) -> None:
        """Draw the numbers that `rng` is about to draw. Before the policy in force ranks."""
        self._rng.setstate(rng.getstate())

    def choose(self, request: Request, snapshot: Snapshot, *, chosen: EndpointName) -> WouldPick:
        """What it would pick of the candidates, where the policy in force picks `chosen`. snapshot: by this policy's spec."""
        try:
            choice = self._scheduler.schedule(request, snapshot)
            name, reason = snapshot.name(choice.places[0]), choice.reason
        except SaturatedError:
            name, reason = EndpointName(""), "saturated"
        agrees = name == chosen
        self.picks += 1
        self.agreed += agrees
        metadata, spec = self.policy.metadata, self.policy.spec
        return WouldPick(policy=metadata.name, rule=spec.rule, chosen=name, reason=reason, agrees=agrees)

    def check_integrity(self) -> None:
        assert 0 <= self.agreed <= self.picks
