"""Reads the important tokens from a request to vLLM: `kv_transfer_params: {"important_tokens": [[0, 4], [96,
128]]}`.

vLLM passes the `kv_transfer_params` of a request to its offload tier unchanged. Ranges are half-open and
count tokens of the prompt, as vLLM counts them. This module does no I/O. Callers: the cache policy, the
ranking.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

FIELD = "important_tokens"
MAX_RANGES = 4096
"""The ranges of a request with more ranges are ignored, because reading them would hold up the thread of
vLLM's scheduler.
"""


class ImportantTokensError(ValueError):
    """The value is not a list of ranges. The message says what to write."""


@dataclass(frozen=True, slots=True)
class ImportantTokens:
    """The important tokens of one prompt: half-open ranges, in order, without overlap."""

    ranges: tuple[tuple[int, int], ...]

    def within(self, begin: int, end: int) -> int:
        """Return how many of the tokens [begin, end) are important."""
        found = 0
        first = max(0, bisect_right(self.ranges, (begin, begin)) - 1)
        for start, stop in self.ranges[first:]:
            if start >= end:
                break
            found += max(0, min(end, stop) - max(begin, start))
        return found


def important_tokens(params: Mapping[str, object]) -> ImportantTokens | None:
    """Return the important tokens. None means that the request names none. Raise ImportantTokensError if the
    value is not allowed.
    """
    value = params.get(FIELD)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_RANGES:
        raise ImportantTokensError(f"{FIELD} must be a list of at most {MAX_RANGES} ranges [begin, end)")
    return ImportantTokens(_united(sorted(_range(part) for part in value)))


def _range(part: object) -> tuple[int, int]:
    match part:
        case [int(begin), int(end)] if 0 <= begin < end:
            return begin, end
    raise ImportantTokensError(
        f"{FIELD} must hold ranges [begin, end) with 0 <= begin < end, not {part!r:.80}"
    )


def _united(ordered: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    united: list[tuple[int, int]] = []
    for begin, end in ordered:
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((begin, end))
    return tuple(united)
