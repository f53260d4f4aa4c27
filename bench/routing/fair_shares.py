"""Compares what each tenant of a run got with what max-min fair sharing would have given it, in computed
prompt tokens.

Counting stops at the last arrival, since no tenant competes afterwards. Requests that came in the last tenth
of this time are left out, since they had no time to be served. A tenant that asks for less than its share
should get all that it asks for. The others share the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model_server.sim.request import Record

_LAST = 0.1


def max_min(asked: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Return the fair share of each tenant: no tenant gets more than it asks for, and no tenant could get
    more without taking tokens from a tenant with an equal or smaller share.
    """
    shares: dict[str, float] = {}
    left = capacity
    for name, wanted in sorted(asked.items(), key=lambda item: item[1]):
        shares[name] = min(wanted, left / (len(asked) - len(shares)))
        left -= shares[name]
    return shares


def of_max_min(records: Sequence[Record]) -> dict[str, float]:
    """Return for each tenant the tokens computed for it, divided by its fair share of all tokens that were
    computed. A request that was never computed counts as if it had no cached tokens.
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
