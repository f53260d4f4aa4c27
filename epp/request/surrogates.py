"""Escapes of lone surrogates in JSON: they are legal JSON, but stand for no text in UTF-8, so the decoder
refuses them.

Models and clients that cut text between the two halves of a pair send them. Called by `parse` and `response`
after decoding has failed, so the search costs a well-formed body nothing.
"""

from __future__ import annotations

import re
from typing import Final

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE_BYTES: Final = 6
_FIRST_HALVES: Final = b"89abAB"
_BACKSLASH: Final = ord("\\")
_MOST: Final = 1000
"""Most escapes of surrogates that are examined. Each takes half a microsecond."""


def replace_lone(json: bytes) -> bytes:
    """Return the same JSON with U+FFFD for each lone surrogate. Pairs stay. JSON with very many surrogates
    is returned unchanged.
    """
    pieces: list[bytes] = []
    done = after_pair = 0
    for number, found in enumerate(_SURROGATE.finditer(json)):
        if number == _MOST:
            return json
        at = found.start()
        if at < after_pair or _is_text(json, at):
            continue
        if found[0][3] in _FIRST_HALVES and _second_half(json, at + _ESCAPE_BYTES):
            after_pair = at + 2 * _ESCAPE_BYTES
            continue
        pieces += (json[done:at], rb"\ufffd")
        done = at + _ESCAPE_BYTES
    return b"".join((*pieces, json[done:])) if pieces else json


def _is_text(json: bytes, at: int) -> bool:
    """Return whether the backslash itself is escaped: an odd number of backslashes stands before it."""
    first = at
    while first > 0 and json[first - 1] == _BACKSLASH:
        first -= 1
    return (at - first) % 2 == 1


def _second_half(json: bytes, at: int) -> bool:
    found = _SURROGATE.match(json, at)
    return found is not None and found[0][3] not in _FIRST_HALVES
