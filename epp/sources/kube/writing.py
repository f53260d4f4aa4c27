"""Writes the statuses of policies and rewrites, which people read with kubectl.

There is no leader: the first process of each replica compares the statuses with its own results, and writes
the differences. Each write names the version of the object that was read. So if two replicas write at once,
the API server refuses the second write, and its picker then sees that nothing is left to write. Called by
`cluster`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from epp.sources.kube.api import Api, ApiError

_log = logging.getLogger(__name__)

_WRITES_AT_ONCE: Final = 20
"""Most statuses written in one look. The others follow at the next look."""
_AGAIN_S: Final = 5.0
"""The same result is not written to an object again before this time has passed. It bounds the writes if one
fails, if an older CRD drops a field, or if a picker of another release has another result."""


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """A status that differs from the result."""

    path: str
    """The path of the object."""
    uid: str
    result: object
    """The result that the status shows, without times."""
    patch: Mapping[str, Any]


class StatusWriter:
    """Call `look` about once a second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tried: dict[str, tuple[object, float]] = {}
        """The last result that was sent, and when, by the uid of the object."""
        self._complaint = ""

    async def look(self, due: Iterable[StatusWrite], *, now: float) -> None:
        """due: all statuses to write, the most important first."""
        self._tried = {uid: tried for uid, tried in self._tried.items() if now - tried[1] < _AGAIN_S}
        fresh = (each for each in due if self._tried.get(each.uid, ("", now))[0] != each.result)
        for each in [*islice(fresh, _WRITES_AT_ONCE)]:
            self._tried[each.uid] = (each.result, now)
            await self._write(each)

    async def _write(self, each: StatusWrite) -> None:
        try:
            await self._api.request("PATCH", f"{each.path}/status", body=each.patch)
        except ApiError as error:
            # 409: the object has changed; the watch will report it. 404: it is gone or has no status.
            if error.status not in (404, 409) and str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("cannot write %s/status and will try again: %s", each.path, error)
            return
        self._complaint = ""
