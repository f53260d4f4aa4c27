"""Computes the headroom of a request: the longest predicted wait at its server with which it is still sent.
So this rule decides which requests wait.

`control` calls it for each new request, and `search` for each search among the waiting requests. It knows the
settings, the expected requests, and the requests that other pickers hold. It does not know the queues.
"""

from __future__ import annotations

from math import inf
from typing import Generic

from epp.flow.demoted import Demoted
from epp.flow.elsewhere import Elsewhere
from epp.flow.expected import Expected
from epp.flow.flow_settings import SHORT_S, FlowSettings
from epp.flow.pace import Pace
from epp.flow.queues import Band, BandKey
from epp.flow.request import Forecast, T

_SCARCE_S = 0.3
"""The headroom while there are too few servers. Requests always wait then, so a server only needs enough work
to bridge the error of the predictions between two scrapes.
"""
_NEWS_S = 0.1
"""About the time until the other pickers know what one picker has done."""
_MAY_LEAD_S = 0.2
"""A tenant may lead a tenant at another picker by the tokens that the pool computes in this time, and still
go first.
"""


class Headroom(Generic[T]):
    def __init__(
        self,
        settings: FlowSettings,
        pace: Pace,
        expected: Expected,
        elsewhere: Elsewhere,
        demoted: Demoted[T],
    ) -> None:
        self.settings = settings
        self._pace = pace
        self._expected = expected
        self._elsewhere = elsewhere
        self._demoted = demoted

    def of_band(self, key: BandKey, band: Band[T], tokens: int, tag: float, *, now: float) -> float:
        """Return the headroom for the requests of this band. Infinity: no request is expected to overtake
        them. Minus infinity: none of them goes. 0: they go to idle servers only.

        tokens: how many tokens of this band wait here. tag: the tokens that the first tenant in order has
        had.

        While a more pressing request waits at another picker, no request of this band goes. Pickers differ in
        their estimates, so a server that is busy would always seem idle to one of them. There are two
        exceptions, and both use idle servers only. First, if no picker has let a request go for a second, the
        reports may be old. Second, if the other picker itself goes on to send less pressing requests, its
        more pressing requests wait for one certain server.

        If a tenant that has had fewer tokens waits at another picker, requests of this band go to idle
        servers only. Among equals, the picker with the most waiting tokens sends first, and each other picker
        sends later, by the time that news takes. Otherwise all of them would send to the same server at the
        same moment.
        """
        elsewhere = self._elsewhere
        if elsewhere.waits_before(key):
            return 0.0 if self._pace.rests(now=now) or elsewhere.passed_over(key, now=now) else -inf
        if elsewhere.in_all.requests:
            may_lead = _MAY_LEAD_S * self._pace.tokens_per_s(now=now)
            if band.first_tag_elsewhere() < tag - may_lead:
                return 0.0
        headroom_s = self.settings.headroom_s
        if headroom_s is None:
            headroom_s = SHORT_S
            if self.settings.order == "arrival" and not self._expected.more_pressing(key, now=now):
                if not self._pace.servers_too_few(now=now) or self._demoted.helps_little(-key[0], now=now):
                    return inf
                headroom_s = _SCARCE_S
        return headroom_s + _NEWS_S * elsewhere.shorter(key, tokens)

    def of_waiting(self, key: BandKey, band: Band[T], *, now: float) -> float:
        """Return the headroom for the requests of this band that wait here; see `of_band`."""
        return self.of_band(key, band, band.tokens, band.first_tag(), now=now)

    def of_request(self, forecast: Forecast, headroom_s: float, *, left_s: float, first: bool) -> float:
        """Return the headroom for one request of a band with `headroom_s`.

        left_s: the time to the deadline of the request. first: the search passed over no other waiting
        request, so this request starves none.
        """
        settings = self.settings
        if headroom_s == inf:
            # No request is expected to overtake this one. It waits only for a server on which it would be in
            # time.
            return max(SHORT_S, left_s - forecast.own_s)
        lowered = headroom_s < (settings.headroom_s or SHORT_S)  # because of requests at other pickers
        if first and not lowered and forecast.own_s <= settings.nearly_cached_s:
            return max(headroom_s, settings.goal_s)
        return headroom_s
