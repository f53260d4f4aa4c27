"""The order in which a rule puts servers, for the tests of rules."""

from __future__ import annotations

import random
from collections import Counter

from epp.config.policy import PolicySpec, RuleName
from epp.config.routing import Cost, Lora
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import Rule
from epp.picker.scheduling.snapshot import Earlier
from tests.unit.picker.scheduling.snapshots import SeenEndpoint, weighed

SPEC = PolicySpec(
    cost=Cost(uncached_token_weight=1.0, stalled_request_weight=0.15),
    lora=Lora(load_seconds=0.5),
)


def rule_of(name: RuleName, *, seed: int = 0) -> Rule:
    return RULES[name](SPEC, random.Random(seed))


def order(
    rule: Rule,
    seen: list[SeenEndpoint],
    *,
    prompt: int = 1000,
    session: str = "",
    beginning: int = 0,
    adapter: str = "",
    earlier: Earlier | None = None,
) -> list[str]:
    ranked = rule.rank(
        weighed(
            seen,
            prompt=prompt,
            session=session,
            beginning=beginning,
            adapter=adapter,
            earlier=earlier,
        )
    )
    return [seen[place].name for place in ranked.places]


def firsts(rule: Rule, seen: list[SeenEndpoint], *, times: int = 400) -> Counter[str]:
    return Counter(order(rule, seen)[0] for _ in range(times))
