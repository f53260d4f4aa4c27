"""A JSON string to the UTF-8 of its text, without making a `str` on the way.

A long text that is not all ASCII costs CPython 3.11 a nanosecond for each character to encode, and as much to decode: 0.9 ms for
400 KB, half of what such a request cost the picker. `_jsontext.c` takes the bytes as they stand, 0.1 ms; it answers None
for whatever it does not plainly know, so that one decoder alone judges what is wrong. Where the picker was installed
without a C compiler every answer is None: the same results, more slowly, and `COMPILED` says so. Called by `parse`.
"""

from __future__ import annotations

from msgspec import Raw

try:
    from epp.request._jsontext import text_of
except ImportError:
    COMPILED = False
else:
    COMPILED = True


def plain_text(value: Raw) -> bytes | None:
    """The UTF-8 of one JSON value that is a string; None: it is no string, or not plainly well formed."""
    return text_of(value) if COMPILED else None
