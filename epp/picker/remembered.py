"""Remembers requests that ended the servers that read them, so that they end no more, and which server keeps
what a request names by an id. Pure: times are monotonic seconds. `picker` owns both objects. Other pickers of
the pool are told (`sharing`).

The data plane says when it gave up a request because the last server ended the connection after it took the
request, and how many servers it tried. A request that was alone at these servers has ended them. If others
were there, it may be any of them, so the request is only suspected. A suspect is sent to one server,
without a retry. If that server ends too, or if the request was alone in the first place, it is refused for
some minutes. A good answer clears a suspect. Requests are known by a keyed hash of their body.

The answer that made a stored response, conversation, file or batch has its id. Ids are known by a keyed hash,
and forgotten after a day, when there are too many, or when the server has restarted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from epp.base.errors import FatalRequestError
from epp.base.types import Endpoint, EndpointName
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet

_REFUSED_S: Final = 300.0
"""How long a request is refused after it has ended two servers."""
_KEPT_S: Final = 900.0
"""How long a request is remembered, and then goes to one server only."""
_MOST: Final = 1_024
"""Most requests that are remembered."""
_TOGETHER_S: Final = 1.0
"""Requests that a server lost within this time may all have been there when it ended."""
_PROOF: Final = 2


class FatalRequests:
    """Call `ended` when the data plane has given up a request. While nothing is `struck`, the other methods
    need no call, so a usual request runs no code of this module.
    """

    def __init__(self) -> None:
        self.struck: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """The number of strikes against each request, and when the last came. By hash, the longest known
        first."""

    def suspects(self, body_hash: int, *, now: float) -> bool:
        """Return whether the request may have ended a server, so that only one server may get it. Raises
        FatalRequestError if the request is refused.
        """
        strikes, at = self.struck.get(body_hash, (0, now))
        age_s = now - at
        if strikes >= _PROOF and age_s < _REFUSED_S:
            raise FatalRequestError(retry_after_s=int(_REFUSED_S - age_s) + 1)
        if age_s >= _KEPT_S:
            del self.struck[body_hash]
        return body_hash in self.struck

    def ended(self, body_hash: int, tried: Sequence[EndpointState], *, tries: int, now: float) -> int:
        """Take in that the last of these servers ended after it took the request, so many tries in
        all. The request is still booked at one of them. Return the strikes against the request.
        """
        others = sum(state.loads[1] for state in tried) > 1
        alone = not others and all(now - state.lost_request_at > _TOGETHER_S for state in tried)
        for state in tried:
            state.lost_request_at = now
        strikes = tries if alone else 1
        self.strike(body_hash, strikes, now=now)
        return strikes

    def strike(self, body_hash: int, strikes: int, *, now: float) -> None:
        """Count strikes against a request, as this picker or another one found."""
        known, _ = self.struck.pop(body_hash, (0, now))
        self.struck[body_hash] = known + strikes, now
        while len(self.struck) > _MOST:
            self.struck.popitem(last=False)

    def answered(self, body_hash: int) -> None:
        """Take in that a server answered the request well."""
        self.struck.pop(body_hash, None)


# -- kept state ----------------------------------------------------------------------------------------------

_STATE_KEPT_S: Final = 86_400.0
_MOST_STATES: Final = 65_536


class KeptState:
    """Hashes of ids, the longest known first."""

    def __init__(self) -> None:
        self._holders: dict[int, tuple[EndpointName, int, float]] = {}
        """The server, a hash of its process, and when it made the object."""

    def remember(self, id_hash: int, server: Endpoint, *, at: float) -> None:
        """Take in that this server has made the object with this id."""
        self._holders.pop(id_hash, None)
        self._holders[id_hash] = (server.name, hash(server.process), at)
        oldest = next(iter(self._holders))
        if len(self._holders) > _MOST_STATES or at - self._holders[oldest][2] > _STATE_KEPT_S:
            del self._holders[oldest]

    def holder(self, id_hash: int, fleet: Fleet, *, now: float) -> EndpointState | None:
        """Return the server that keeps the object. None: not known, another process now, or it hangs."""
        server, process, at = self._holders.get(id_hash, (EndpointName(""), 0, now))
        state = fleet.get(server)
        if state is None or state.cold_at > at or now - at > _STATE_KEPT_S:
            return None
        if hash(state.endpoint.process) != process:
            return None
        # Any other server can only answer 404. So a server that fails is asked too, if it answers at all.
        return None if fleet.failures.proved_to_hang(state) else state
