"""Logs which servers are left out because they fail or hang: one line when a server is left out, and another
when the server gets requests again.

Called by the composition root a few times a second, with the servers that are left out at the moment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

_log = logging.getLogger(__name__)


class SickServersLog:
    """Remembers which servers it has reported."""

    def __init__(self) -> None:
        self._left_out: Mapping[str, str] = {}

    def look(self, left_out: Mapping[str, str]) -> None:
        """left_out: the servers that are left out, and why."""
        if left_out == self._left_out:
            return
        for name in left_out.keys() - self._left_out.keys():
            _log.warning("%s gets only trial requests: %s", name, left_out[name])
        for name in self._left_out.keys() - left_out.keys():
            _log.info("%s gets requests again", name)
        self._left_out = left_out
