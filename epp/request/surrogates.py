"""Escapes of lone surrogates in JSON: legal to write, but no text in UTF-8, so the decoder refuses them.

Models and clients that cut text between two halves of a pair do send them. Called by `parse` and `response` once decoding
has failed, so the search costs a well-formed body nothing.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    rb"(?<!\\)((?:\\\\)*)(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""An escaped surrogate, group 2 when it is a pair. The backslashes before it, group 1, are even in number: else it is text."""


def replace_lone(json: bytes | memoryview) -> bytes:
    """The same JSON with U+FFFD for each lone surrogate; pairs stay."""
    return _ESCAPES.sub(lambda found: found[0] if found[2] else found[1] + rb"\ufffd", json)
