"""How one policy puts the candidates of a pick in order: the gain threshold, the load thresholds, then its rule.

Pure, but for what a rule remembers of its own turns. Called by `picker` for the policy in force and by `dry_run` for one that is tried.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from epp.errors import NoEndpointError, SaturatedError
from epp.policy import Policy
from epp.scheduling.candidates import View, gate
from epp.scheduling.rules import RULES
from epp.types import Address
from epp.views import apply_gain


class Chooser:
    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self._spec = policy.spec
        self._rule = RULES[policy.spec.rule](policy.spec, rng)

    def order(
        self, views: Sequence[View], *, prompt_tokens: int, session: str, adapter: str
    ) -> tuple[list[View], str]:
        """All views, best first, the left-out last; and the reason of the choice.

        SaturatedError where every endpoint is over a load threshold and the policy refuses requests then.
        """
        apply_gain(views, prompt_tokens, self._spec.gain)
        gated = gate(views, spec=self._spec)
        load = self._spec.load
        if gated.saturated and load.when_saturated == "Reject":
            raise SaturatedError(
                f"every model server is over its load limit; try again in {load.retry_after_seconds} s",
                retry_after_s=load.retry_after_seconds,
            )
        if not self._rule.gated:
            for view in views:
                view.excluded = ""
            return self._rule.rank(views, session=session, adapter=adapter)
        ordered, reason = self._rule.rank(gated.views, session=session, adapter=adapter)
        if len(ordered) < len(views):
            ordered += sorted((v for v in views if v.excluded), key=lambda v: v.in_flight)
        return ordered, "saturated" if gated.saturated else reason


def prescribed(views: Sequence[View], addresses: Sequence[Address]) -> list[View]:
    """Those that a conformance test names, in its order. NoEndpointError where none of them exists."""
    wanted = [v for address in dict.fromkeys(addresses) for v in views if v.address == address]
    if not wanted:
        raise NoEndpointError("none of the prescribed endpoints exists", reason="subset_empty")
    return wanted
