"""Computes how soon a server must be free before a request is sent to it. This rule decides which requests
wait.

Called by `control` for each new request and for each look at the waiting requests. It knows the settings, the
expected requests, and the requests that other pickers hold. It does not know the queues.
"""

from __future__ import annotations

from math import inf

from epp.flow.elsewhere import Elsewhere
from epp.flow.expected import Expected
from epp.flow.pace import Pace
from epp.flow.queues import Band, BandKey
from epp.flow.request import Forecast, T
from epp.flow.settings import SHORT_S, FlowSettings

_SCARCE_S = 0.3
"""The headroom while servers are too few.
Something always waits then, so a server needs no more at hand than predictions err between two scrapes."""
_NEWS_S = 0.1
"""What one picker does is known to the others after about this time."""
_MAY_LEAD_S = 0.2
"""So much more than a tenant at another picker may a tenant have had that goes before it:
what the pool computes in this time."""


class Headroom:
    def __init__(self, settings: FlowSettings, pace: Pace, expected: Expected, elsewhere: Elsewhere) -> None:
        self.settings = settings
        self._pace = pace
        self._expected = expected
        self._elsewhere = elsewhere

    def of_band(self, key: BandKey, band: Band[T], tokens: int, tag: float, *, now: float) -> float:
        """For requests of this band, of which so many tokens wait here; inf: nobody is to overtake them.
        -inf: none of them goes. tag: what the tenant has had that goes first of them.

        While something more pressing waits at another picker, none goes: pickers differ in what they believe
        of a server, so it would seem idle to one of the others. There are two exceptions, for idle servers
        alone. Nothing goes for a second: what was heard may be old. Or the other picker goes on with less
        pressing requests: what waits there waits for a certain server. Where a tenant waits elsewhere that
        has had less, a request goes to an idle server only. Of other equals, the picker with the most tokens
        looks first and the others later by as long as news of it takes; or all of them would send to the same
        server at the same moment.
        """
        elsewhere = self._elsewhere
        if elsewhere.waits_before(key):
            return 0.0 if self._pace.rests(now=now) or elsewhere.passed_over(key, now=now) else -inf
        if elsewhere.in_all.requests:
            may_lead = _MAY_LEAD_S * self._pace.tokens_per_s(now=now)
            if band.first_tag_away() < tag - may_lead:
                return 0.0
        headroom_s = self.settings.headroom_s
        if headroom_s is None:
            headroom_s = SHORT_S
            if self.settings.order == "arrival" and not self._expected.more_pressing(key, now=now):
                if not self._pace.servers_too_few(now=now):
                    return inf
                headroom_s = _SCARCE_S
        return headroom_s + _NEWS_S * elsewhere.shorter(key, tokens)

    def of_request(self, forecast: Forecast, headroom_s: float, *, left_s: float, first: bool) -> float:
        """For one request of a band with `headroom_s`.

        left_s: time to its deadline. first: nobody stands before it who waits for room, and would starve.
        """
        settings = self.settings
        if headroom_s == inf:
            # Nobody is to overtake it. It waits only for a server on which it would be in time.
            return max(SHORT_S, left_s - forecast.own_s)
        rides = (
            first and headroom_s >= (settings.headroom_s or SHORT_S) and forecast.own_s <= settings.rides_s
        )
        return max(headroom_s, settings.goal_s) if rides else headroom_s
