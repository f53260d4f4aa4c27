"""Writes the status of InferenceModelRewrites. The module writes only while the Lease is held, as with the
status of policies. Once a second it compares each object's result with its status, and writes the
differences. A write that fails is tried again a second later. Called by `cluster`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from epp.sources.kube.api import Api, ApiError, read
from epp.sources.kube.objects import Condition, ModelRewrite
from epp.sources.kube.policies import PolicyResult
from epp.sources.kube.policy_status import Unclaimed
from epp.sources.kube.rewrite_status import Key, accepted, judge, observed_generation, patch, unclaimed
from epp.sources.kube.rewrites import PATHS, ModelRewrites, RewriteClaim

_log = logging.getLogger(__name__)

_WRITES_AT_ONCE: Final = 20
"""Most writes in one look. The others follow at the next look."""
_AGAIN_S: Final = 10.0
"""Pause after a write that left the object unchanged."""


class RewriteWriter:
    """Call `look` once a second."""

    def __init__(
        self, api: Api, newer_first: Sequence[ModelRewrites], *, namespace: str, time_text: Callable[[], str]
    ) -> None:
        self._api = api
        self._sets = newer_first
        self._namespace = namespace
        self._time_text = time_text
        self._results: Mapping[Key, PolicyResult] = {}
        self._judged_at: tuple[object, ...] = ()
        self._unclaimed = Unclaimed()
        self._tried: dict[tuple[str, str], float] = {}
        """When the status of an object was last sent, by its uid and version."""
        self._complaint = ""

    async def look(
        self,
        *,
        existing: Collection[str],
        served: frozenset[str] | None,
        holds: Callable[[], bool],
        now: float,
    ) -> None:
        """existing: the pools that exist.
        served: every model that a server lists. None: the lists are not known.
        holds: whether the Lease is held. Called before each write.
        """
        due = [*self._due(existing=existing, served=served), *self._due_unclaimed(now=now)]
        versions = {(claim.uid, claim.resource_version) for _, claim, _ in due}
        self._tried = {key: at for key, at in self._tried.items() if key in versions and now - at < _AGAIN_S}
        fresh = (each for each in due if (each[1].uid, each[1].resource_version) not in self._tried)
        for rewrites, claim, wanted in [*islice(fresh, _WRITES_AT_ONCE)]:
            if not holds():
                return
            self._tried[claim.uid, claim.resource_version] = now
            await self._write(rewrites, claim, wanted)

    def _due(
        self, *, existing: Collection[str], served: frozenset[str] | None
    ) -> Iterator[tuple[ModelRewrites, RewriteClaim, Condition]]:
        """Yield the objects of our pools whose status differs from their result."""
        state = (tuple(rewrites.version for rewrites in self._sets), frozenset(existing), served)
        if state != self._judged_at:
            self._judged_at, self._results = state, judge(self._sets, existing=existing, served=served)
        for rewrites in self._sets:
            for claim in rewrites.claims():
                wanted = accepted(self._results[claim.group, claim.name], claim, time_text=self._time_text())
                if wanted not in claim.conditions:
                    yield rewrites, claim, wanted

    def _due_unclaimed(self, *, now: float) -> Iterator[tuple[ModelRewrites, RewriteClaim, Condition]]:
        """Yield the objects for other pools that nobody has judged for long enough."""
        waiting = {
            (claim.uid, claim.generation): (rewrites, claim)
            for rewrites in self._sets
            for claim in rewrites.of_other_pools()
            if observed_generation(claim) < claim.generation
        }
        for rewrites, claim in self._unclaimed.due(waiting, now=now):
            yield rewrites, claim, unclaimed(claim, time_text=self._time_text())

    async def _write(self, rewrites: ModelRewrites, claim: RewriteClaim, wanted: Condition) -> None:
        path = f"{PATHS[rewrites.group].format(namespace=self._namespace)}/{claim.name}/status"
        try:
            answer = await self._api.request("PATCH", path, body=patch(claim, wanted))
            rewrites.wrote(read(answer, ModelRewrite))
        except ApiError as error:
            # 409: the object has changed; the watch will report it. 404: it is gone or has no status.
            if error.status not in (404, 409) and str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot write the status of rewrite %s and will try again: %s", claim.name, error)
            return
        self._complaint = ""
