"""Recognizes blocked paths, the model servers' paths for their operators, in every spelling.

A path is refused if a gateway, a proxy or a model server on its way could read it as a blocked path. So it is
compared in several readings: percent-encoding undone up to `_DECODINGS` times, dot segments resolved and left
alone, slashes merged, backslashes as slashes, parameters (`;a=b`), control characters and spaces taken out,
in any case. What begins with a blocked path is blocked too: vLLM serves its metrics at `/metricsX`, and every
route with a line feed at its end. If a path is refused that no server has, nothing is lost, because the model
server would also answer 404. Pure; called by `protocol.stream`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import unquote

from epp.request.parse import API_PATHS

_MAX_CHARS: Final = 2048
"""A longer path is refused unread if it needs more than one reading. So reading takes less than half a
millisecond."""
_DECODINGS: Final = 3
"""More than two hops that each decode once more are not expected."""

_PLAIN: Final = re.compile(r"(?:/[a-z0-9_-]+)+")
"""A path with only one reading. All of vLLM's own paths are such."""
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*")
_CLEANED: Final = str.maketrans({"\\": "/"} | dict.fromkeys(map(chr, (*range(33), 127))))


class BlockedPaths:
    """`prefixes` are as in the configuration: each begins with a slash and does not end with one."""

    __slots__ = ("_prefixes", "open_apis")

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(prefix.lower() for prefix in prefixes)
        self.open_apis = frozenset(path for path in API_PATHS if not path.startswith(self._prefixes))
        """The paths of nearly all requests, which `refuse` need not read each time."""

    def refuse(self, target: str) -> bool:
        """Return whether a request for `target` must be refused. `target` is the `:path` as it came."""
        path = target.partition("?")[0]
        if _PLAIN.fullmatch(path):
            return path.startswith(self._prefixes)
        if not self._prefixes:
            return False
        if len(path) > _MAX_CHARS:
            return True
        return any(reading.startswith(self._prefixes) for reading in _readings(path))


def _readings(path: str) -> Iterator[str]:
    """Yield all paths that another program could read from this one."""
    if not path.startswith("/"):
        path = _ORIGIN.sub("", path, count=1)
    for _ in range(_DECODINGS + 1):
        segments = [s.partition(";")[0] for s in path.translate(_CLEANED).lower().split("/")]
        yield _merged(segments)
        if ".." in segments:
            # Whether slashes are merged before dot segments are resolved, or after, differs from hop to hop.
            yield _merged(_resolved(s for s in segments if s))
            yield _merged(_resolved(segments[1:]))
        decoded = unquote(path)
        if decoded == path:
            return
        path = decoded


def _merged(segments: Iterable[str]) -> str:
    return "/" + "/".join(s for s in segments if s not in ("", "."))


def _resolved(segments: Iterable[str]) -> list[str]:
    """Return the path without dot segments, as RFC 3986 removes them. An empty segment counts as a
    segment.
    """
    kept: list[str] = []
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return kept
