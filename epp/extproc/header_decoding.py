"""Reads header messages off protobuf's wire without protobuf, as far as they have their usual shape.

A request has some fifteen headers and routing reads a few of them; decoding the whole message made an object
for each and was, with cold caches, a quarter of what a request cost. Each header is stepped over by its
length, never searched for, so that no value can pass for another header. Whatever is not exactly as data
planes send it is left to the ordinary decoder: every function here answers None then, and never guesses.
Called by `codec` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Wire tags: field number times eight plus the wire type.
_MAP_TAG: Final = 0x0A
_HEADER_TAG: Final = 0x0A
_KEY_TAG: Final = 0x0A
_RAW_VALUE_TAG: Final = 0x1A
_END_OF_STREAM: Final = {b"": False, b"\x18\x00": False, b"\x18\x01": True}

_VARIES: Final = frozenset((b"content-length", b"x-request-id"))
"""Headers whose values seldom come again."""
_KEPT: Final = 1024
"""Headers that are remembered by their bytes, of at most 130 bytes each."""

Headers = tuple[list[tuple[str, str]], bool, int]
"""The headers asked for, the end-of-stream flag, and where the rest of the message begins."""


class HeaderReader:
    """Reads the headers in `names` out of messages.
    Headers that came before are known by their bytes, so that they are not read anew.
    """

    __slots__ = ("_known", "_wanted")

    def __init__(self, names: Iterable[str]) -> None:
        """A name that is not lower-case ASCII is passed over:
        messages that hold such names go by protobuf.
        """
        self._wanted = {n.encode(): n for n in names if n.isascii() and n == n.lower()}
        self._known: dict[bytes, tuple[str, str] | tuple[()]] = {}
        """By a header's bytes on the wire, from its tag on:
        its name and value, or nothing for one that is not asked for."""

    @property
    def known(self) -> int:
        """Headers that are remembered."""
        return len(self._known)

    def read(self, data: bytes) -> Headers | None:
        """The first field of a message, which holds HTTP headers."""
        try:
            return self._read(data)
        except IndexError:
            return None

    def _read(self, data: bytes) -> Headers | None:
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
        found: list[tuple[str, str]] = []
        known = self._known
        while at < map_end:
            # A header of 128 bytes or more has a longer length,
            # which no header that is remembered begins with.
            stop = at + 2 + data[at + 1]
            header = known.get(data[at:stop])
            if header is None:
                stop, header = self._next(data, at)
                if header is None:
                    return None
            if header:
                found.append(header)
            at = stop
        return (found, end_of_stream, end) if at == map_end else None

    def _next(self, data: bytes, at: int) -> tuple[int, tuple[str, str] | tuple[()] | None]:
        """Where the header at `at` ends, and what it is; None: not as data planes send it."""
        size, key = data[at + 1], at + 2
        if size >= 0x80:
            size, key = varint(data, at + 1)
        key_size = data[key + 1]
        value = key + 2 + key_size
        if data[at] != _HEADER_TAG or data[key] != _KEY_TAG or key_size >= 0x80:
            return at, None
        end = key + size
        start = value + 2
        if value == end:
            start = end
        elif data[value] != _RAW_VALUE_TAG:
            return at, None
        elif end - start >= 0x80 or data[value + 1] != end - start:
            size, start = varint(data, value + 1)
            if start + size != end:
                return at, None
        name = data[key + 2 : value]
        text = self._wanted.get(name)
        header: tuple[str, str] | tuple[()] = ()
        if text:
            header = (text, data[start:end].decode("latin-1"))
        elif not (name.isascii() and name.islower()):
            # Names in other letters can mean a wanted one:
            # Unicode even has a sign whose lower case is the plain k.
            return at, None
        if key == at + 2 and end <= len(data) and name not in _VARIES:
            self._remember(data[at:end], header)
        return end, header

    def _remember(self, data: bytes, header: tuple[str, str] | tuple[()]) -> None:
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[data] = header


def fields(data: bytes, at: int) -> dict[int, bytes] | None:
    """The rest of a message by tag: each field with tag and length in front.
    None: a field twice, or one without a length.
    """
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
    if at + 1 < len(data):  # Nearly all lengths have one byte or two.
        first, second = data[at], data[at + 1]
        if first < 0x80:
            return first, at + 1
        if second < 0x80:
            return first & 0x7F | second << 7, at + 2
    value = shift = 0
    for position in range(at, min(at + 5, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return len(data) + 1, at
