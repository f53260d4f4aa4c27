"""Reads a `traceparent` (W3C Trace Context). Pure. Accepts any text at a bounded cost. None: the text is not
a valid `traceparent`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_VERSION_00_CHARS: Final = 55
_READ: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-|\Z)").match


class Parent(NamedTuple):
    """The caller's span."""

    trace_id: int
    span_id: int
    sampled: bool


def read_traceparent(text: str) -> Parent | None:
    """Return the caller's span. None: the request begins a new trace."""
    found = _READ(text)
    if found is None or (found[1] == "00" and len(text) != _VERSION_00_CHARS):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & 1))
