"""The order in which a rule puts servers, for the tests of rules."""

import random
from collections import Counter
from typing import Any

from epp.config.policy import Cost, Lora, PolicySpec, RuleName
from epp.picker.scheduling.rules import RULES
from epp.picker.scheduling.schedule import Rule
from tests.unit.picker.scheduling.snapshots import SeenEndpoint, weighed

SPEC = PolicySpec(
    cost=Cost(uncached_token_weight=1.0, stalled_request_weight=0.15),
    lora=Lora(load_seconds=0.5),
)


def rule_of(name: RuleName, *, seed: int = 0) -> Rule:
    return RULES[name](SPEC, random.Random(seed))


def order(rule: Rule, seen: list[SeenEndpoint], **question: Any) -> list[str]:
    """Return the names as the rule puts them in order. question: see `weighed`."""
    return [seen[place].name for place in rule.rank(weighed(seen, **question)).places]


def firsts(rule: Rule, seen: list[SeenEndpoint], *, times: int = 400) -> Counter[str]:
    return Counter(order(rule, seen)[0] for _ in range(times))
