"""What each tenant of a run got of what max-min fair sharing would have given it, in prompt tokens computed.

Counted until the last request comes, since nobody competes afterwards, and without the requests of the last
tenth of that time, which had no time to be served. A tenant that asks for less than its share is to get all
that it asks for; what it leaves is shared by the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model_server.sim.request import Record

_LAST = 0.1


def max_min(asked: Mapping[str, float], capacity: float) -> dict[str, float]:
    """The fair share of each: nobody gets more than it asks for, and nobody could get more
    without one that has no more getting less.
    """
    shares: dict[str, float] = {}
    left = capacity
    for name, wanted in sorted(asked.items(), key=lambda item: item[1]):
        shares[name] = min(wanted, left / (len(asked) - len(shares)))
        left -= shares[name]
    return shares


def of_max_min(records: Sequence[Record]) -> dict[str, float]:
    """By tenant: tokens computed for it, over its fair share of all that were computed.

    A request that was never computed counts as one without cached tokens.
    """
    until_s = max((record.arrived_s for record in records), default=0.0)
    asked: dict[str, float] = {}
    had: dict[str, float] = {}
    first_s = min((record.arrived_s for record in records), default=0.0)
    for record in records:
        if record.arrived_s > until_s - _LAST * (until_s - first_s):
            continue
        tenant = record.request.tenant
        tokens = record.num_prompt_tokens - (record.num_cached_tokens or 0)
        asked[tenant] = asked.get(tenant, 0.0) + tokens
        computed = record.first_token_s is not None and record.first_token_s <= until_s
        had[tenant] = had.get(tenant, 0.0) + (tokens if computed else 0.0)
    fair = max_min(asked, sum(had.values()))
    return {tenant: had[tenant] / fair[tenant] for tenant in asked if fair[tenant] > 0}
