"""The facts that a rule may use: about one request, and about the endpoints at one moment, as columns of
numbers with one place for each candidate.

No code writes to the arrays, so a snapshot never changes. Unknown values are NaN. A candidate is identified
by its place in the snapshot; its slot is its position in the fleet. `endpoints.fleet` makes snapshots.
`scheduling.schedule` and the rules read them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from epp.base.types import Address, Endpoint, EndpointName
from epp.picker.prefix_index.table import Mirror

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]

MOST_KEPT = 4096
"""The most entries of anything that clients or sources name: prefixes, sessions, models, servers."""
_AS_REQUESTS = 10.0
"""Requests that are added to the load of a server whose answers all fail."""


class SchedulingRequest(Struct, frozen=True, eq=False, gc=False):
    """The facts about one request that scheduling needs."""

    at: float
    """When the question is asked."""
    prompt_tokens: int
    """Estimated tokens of the prompt, including the other prompts of a batch."""
    cached_tokens: Floats
    """Prompt tokens that each candidate of the snapshot holds, as far as the prefix table knows."""
    session: str = ""
    beginning: int = 0
    """Hash of the prompt's first bytes; 0: it is too short, or could not be read."""
    prefix: int = 0
    """Hash of the last chunk of the prompt that any server holds. 0: no server holds a part of it."""
    text_bytes: int = 0
    """Size of the prompt's text, as the caches count it."""
    caches: Mapping[EndpointName, Mirror] | None = None
    """What each server's cache is assumed to hold. None: nothing is known of the caches."""
    holder: int | None = None
    """The place of the server that keeps what the request names. None: no server is known to."""
    left_s: float = inf
    """The time to the deadline of the first token."""


class SentPick(Struct, frozen=True, eq=False, gc=False):
    """A request that was sent to a server, as far as a rule may remember it."""

    server: EndpointName
    at: float
    prefix: int = 0
    """See `SchedulingRequest`. 0 too if the prompt was not read."""
    session: str = ""
    beginning: int = 0
    """See `SchedulingRequest`, too."""


class Roster:
    """The slot of each endpoint in the fleet. A roster is immutable: each new list of endpoints makes a
    new roster.
    """

    __slots__ = ("addresses", "answers", "by_name", "everyone", "models", "names", "names_hashed", "turn")

    def __init__(self, endpoints: Sequence[Endpoint], *, models: Sequence[str] = ()) -> None:
        """models: the base model of each endpoint, if the picker knows more than the source declares."""
        self.everyone = range(len(endpoints))
        """All slots, in order."""
        self.names: list[EndpointName] = [e.name for e in endpoints]
        self.addresses: list[Address] = [e.destination for e in endpoints]
        self.models: Sequence[str] = models or [e.model for e in endpoints]
        self.answers: Bools = np.array([e.role.answers for e in endpoints], dtype=np.bool_)
        """For each slot, whether it may be a destination."""
        self.by_name: list[EndpointName] = sorted(self.names)
        """All names in the order of the alphabet."""
        place = {name: n for n, name in enumerate(self.by_name)}
        self.turn: Ints = np.array([place[name] for name in self.names], dtype=np.int64)
        """For each slot, the place of its name in `by_name`."""
        digests = [xxh3_64_intdigest(name.encode()) for name in self.names]
        self.names_hashed: Hashes = np.array(digests, dtype=np.uint64)
        """For each slot, a hash of its name: the same in every picker."""


class Snapshot(Struct, frozen=True, eq=False, gc=False, kw_only=True):
    """The endpoints that may serve a request, as they are now."""

    roster: Roster
    slots: Sequence[int]
    """The slot of each candidate, in order unless the snapshot was `narrowed` to another; never empty."""
    undone_tokens: Floats
    """B: estimated prompt tokens that were sent to the server and that it has not computed yet."""
    rate: Floats
    """V: prompt tokens that the server computes in a second."""
    in_flight: Floats
    """L: requests that run or wait at the server. If the metrics are stale, the requests that pickers know
    of."""
    waiting: Floats
    """Requests in the server's queue. NaN: the metrics are stale."""
    kv_usage: Floats
    """Share of the KV cache in use. NaN: the metrics are stale."""
    at: slice | Ints = slice(None)
    """The index of the candidates into an array that has a value for each slot of the fleet."""
    most_waiting: float = inf
    """Upper bound of the candidates' requests in the queue."""
    most_kv_usage: float = inf
    """Upper bound of the candidates' share of the KV cache in use."""
    has_adapter: Bools | None = None
    """Whether the server has loaded the request's adapter. None: the request names no adapter."""
    free_slot: Bools | None = None
    """Whether one more adapter can be loaded without dropping another; None: the request names no adapter."""
    failure_share: Floats | None = None
    """Share of each candidate's recent answers that failed. None: no answer failed."""
    no_token: Bools | None = None
    """Candidates that were asked lately and gave no token, which others did. None: there is no such
    candidate."""
    unreported_picks: float = 0.0
    """Estimated number of requests that other pickers have sent and that this picker does not know of yet."""
    failing: Bools | None = None
    """Candidates that are ejected because their answers fail. None: no candidate is."""
    trials: Sequence[int] = ()
    """Places of failing candidates that may get a trial request now."""

    def __len__(self) -> int:
        return len(self.slots)

    def place(self, slot: int) -> int | None:
        """Return the place of a slot. None: it is no candidate."""
        place = bisect_left(self.slots, slot)
        return place if place < len(self.slots) and self.slots[place] == slot else None

    def burden(self) -> Floats:
        """Return the requests in flight, for rules that choose by load.

        Failed answers count as requests, since a server that fails at once is always idle.
        """
        if self.failure_share is None:
            return self.in_flight
        return self.in_flight + _AS_REQUESTS * self.failure_share

    def narrowed(self, places: Ints) -> Snapshot:
        """Return a snapshot of some candidates, in the order of `places`. None of them counts as failing."""
        at = places if isinstance(self.at, slice) else self.at[places]
        return replace(
            self,
            slots=at.data,  # `tolist` takes longer than all else here
            at=at,
            undone_tokens=self.undone_tokens[places],
            rate=self.rate[places],
            in_flight=self.in_flight[places],
            waiting=self.waiting[places],
            kv_usage=self.kv_usage[places],
            has_adapter=self.has_adapter[places] if self.has_adapter is not None else None,
            free_slot=self.free_slot[places] if self.free_slot is not None else None,
            failure_share=self.failure_share[places] if self.failure_share is not None else None,
            no_token=self.no_token[places] if self.no_token is not None else None,
            failing=None,
            trials=(),
        )
