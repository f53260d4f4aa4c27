"""Reads header messages off protobuf's wire without protobuf, as far as they have their usual shape.

A request has some fifteen headers and routing reads a few of them; decoding the whole message made an object for each
and was, with cold caches, a quarter of what a request cost. Each header is stepped over by its length, never searched for,
so that no value can pass for another header. Whatever is not exactly as data planes send it is left to the ordinary
decoder: every function here answers None then, and never guesses. Called by `codec` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Wire tags: field number times eight plus the wire type.
_MAP_TAG: Final = 0x0A
_HEADER_TAG: Final = 0x0A
_KEY_TAG: Final = 0x0A
_RAW_VALUE_TAG: Final = 0x1A
_END_OF_STREAM: Final = {b"": False, b"\x18\x00": False, b"\x18\x01": True}

Headers = tuple[list[tuple[str, str]], bool, int]
"""The headers asked for, the end-of-stream flag, and where the rest of the message begins."""


def read_headers(data: bytes, wanted: Mapping[bytes, str]) -> Headers | None:
    """The first field of a message, which holds HTTP headers.

    `wanted`: lower-case ASCII names, as bytes and as text; a name to no text is passed over like one that is not there, only
    faster.
    """
    try:
        return _read_headers(data, wanted)
    except IndexError:
        return None


def _read_headers(data: bytes, wanted: Mapping[bytes, str]) -> Headers | None:
    size, at = varint(data, 1)
    end = at + size
    if end > len(data) or data[at] != _MAP_TAG:
        return None
    size, at = varint(data, at + 1)
    map_end = at + size
    if map_end > end:
        return None
    end_of_stream = _END_OF_STREAM.get(data[map_end:end])
    if end_of_stream is None:
        return None
    found = _entries(data, at, map_end, wanted)
    return None if found is None else (found, end_of_stream, end)


def _entries(data: bytes, at: int, end: int, wanted: Mapping[bytes, str]) -> list[tuple[str, str]] | None:
    """One loop that calls nothing in the usual case: it runs for every header of every request."""
    found = []
    while at < end:
        size = data[at + 1]
        key = at + 2
        if size >= 0x80:
            size, key = varint(data, at + 1)
        key_size = data[key + 1]
        value = key + 2 + key_size
        if data[at] != _HEADER_TAG or data[key] != _KEY_TAG or key_size >= 0x80:
            return None
        at = key + size
        start = value + 2
        if value == at:
            start = at
        elif data[value] != _RAW_VALUE_TAG:
            return None
        elif at - start >= 0x80 or data[value + 1] != at - start:
            size, start = varint(data, value + 1)
            if start + size != at:
                return None
        name = data[key + 2 : value]
        text = wanted.get(name)
        if text:
            found.append((text, data[start:at].decode("latin-1")))
        elif text is None and not (name.isascii() and name.islower()):
            # Names in other letters can mean a wanted one: Unicode even has a sign whose lower case is the plain k.
            return None
    return found if at == end else None


def fields(data: bytes, at: int) -> dict[int, bytes] | None:
    """The rest of a message by tag: each field with tag and length in front. None: a field twice, or one without a length."""
    found: dict[int, bytes] = {}
    while at < len(data):
        tag = data[at]
        if tag >= 0x80 or tag & 7 != 2 or tag in found:
            return None
        size, start = varint(data, at + 1)
        if start + size > len(data):
            return None
        found[tag] = data[at : start + size]
        at = start + size
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A length and where it ends. A broken one is larger than any message."""
    value = shift = 0
    for position in range(at, min(at + 5, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return len(data) + 1, at
