"""Reads the JSON of request bodies as bytes, without making Python objects of it, and estimates before that
what reading a body will cost.

A long text that is not all ASCII costs CPython 3.11 a nanosecond for each character to encode, and as much to
decode: 0.9 ms for 400 KB, half of what such a request cost the picker; and a `str` takes four bytes for each
letter as soon as there is one emoji in it. `_jsontext.c` works on the bytes directly, in 0.1 ms. It returns
None for everything that it does not know for certain, so that only one decoder judges errors.

A JSON decoder takes a hundred times as long for a body of brackets as for a text of the same size, and a
hundred times as much memory. So one pass over the bytes counts what the body holds, and an estimate in
nanoseconds follows from the counts. A body is read if the estimate is at most ten times the time of plain
text of its size, and at most the time for which the event loop may be held. The work of `parse` for each
counted item must stay within the price of this item (tests/property/request/test_request_cost.py). The prices
are those of a core of 2024. They are the same on every machine, so that either every replica reads a body or
none does.

Other JSON from outside, such as a server's page, is decoded into Python values only if that is quick. Most
JSON takes a decoder 5 ns a byte, but an empty list takes 100 ns a byte, and a number such as 1e-310 takes 4
us a byte. So JSON that would take longer than about 15 ms is refused before.

Pure. Called by `parse` and `canonical`, and by sources for foreign JSON.
"""

import re
from array import array
from typing import Any, Final

import msgspec
from msgspec import Raw

from epp.request._jsontext import text_of, weigh

NO_RAW: Final = Raw(b"")
"""The value of a field that a body does not have."""
_QUOTE = ord('"')
_DECODE_TEXT = msgspec.json.Decoder(str)
_DECODE_IDS = msgspec.json.Decoder(list[int])

PLAIN_NS: Final = 0.6
"""Time for one byte of plain text, up to the chain of hashes."""
_FLOOR_NS: Final = 1_000_000
"""Every request may cost this much, however short it is. The picker needs nearly as much time to transport
it."""
_TIMES_PLAIN: Final = 10
_LONGEST_NS: Final = 12_000_000
"""Nothing may hold the loop for more than 20 ms, so this leaves a margin of two fifths."""

_BYTE_NS: Final = 1.5
_UNIT_NS: Final = 25
"""Time for each string, list, object and comma: three passes of the decoder."""
_CONTAINER_NS: Final = 1200
"""Time for each message, part of its content, or prompt of a batch. Each becomes a Python object."""
_ITEM_NS: Final = 150
"""Time for each string in these, and for each number in the place of a part."""
_ESCAPE_NS: Final = 10

SMALL_BYTES: Final = 4096
"""A body of this size cannot cost more than every request may cost."""
MOST_UNITS: Final = _LONGEST_NS // _UNIT_NS
"""Counting stops here. A body with so many units is too costly, whatever else it contains."""
MOST_BYTES: Final = _LONGEST_NS / _BYTE_NS
"""A longer body is too costly, whatever it contains."""
_MOST_NAME_BYTES: Final = 8192
"""A longer name is ignored where no more of a body is read."""


def text_bytes(value: Raw) -> bytes | None:
    """Return the UTF-8 of one JSON value if it is a string, else None. Raise DecodeError if the string is
    malformed.
    """
    text = text_of(value)
    if text is not None or first_byte(value) != _QUOTE:
        return text
    return _DECODE_TEXT.decode(value).encode()


def token_bytes(value: Raw) -> bytes:
    """Return a JSON array of token ids, as four little-endian bytes each. Raises ValidationError or
    OverflowError if it is no such array.
    """
    return array("I", _DECODE_IDS.decode(value)).tobytes()


def first_byte(value: Raw) -> int:
    """Return the first byte of a JSON value, which shows its kind. 0: there is none."""
    view = memoryview(value)
    return view[0] if view else 0


# -- what reading a body costs ---------------------------------------------------------------------------


def too_costly(body: bytes | memoryview) -> bool:
    """Return whether reading this body would take too long. Counts what it contains in one pass: 0.1 ns for a
    byte of text, 3 ns for any other byte.
    """
    size = len(body)
    if size <= SMALL_BYTES or size > MOST_BYTES:
        return size > SMALL_BYTES
    units, containers, items, escapes = weigh(body, MOST_UNITS, ())[0]
    estimate_ns = (
        size * _BYTE_NS
        + units * _UNIT_NS
        + containers * _CONTAINER_NS
        + items * _ITEM_NS
        + escapes * _ESCAPE_NS
    )
    return estimate_ns > min(_FLOOR_NS + _TIMES_PLAIN * PLAIN_NS * size, _LONGEST_NS)


def units_of(text: bytes) -> int:
    """Return the number of strings, lists, objects and commas, or a number over `MOST_UNITS`."""
    return weigh(text, MOST_UNITS, ())[0][0]


def places_of(body: bytes | memoryview, *names: str) -> list[slice]:
    """Return where the texts and objects of these fields stand, of each field the last. An empty slice: not
    found, too long, or of another kind.
    """
    places = weigh(body, MOST_UNITS, names)[1]
    return [slice(a, b if b <= a + _MOST_NAME_BYTES else a) for a, b in places]


# -- foreign JSON --------------------------------------------------------------------------------------------

_MOST_FOREIGN_BYTES: Final = 2**20
MOST_FOREIGN_UNITS: Final = 100_000
"""Most strings, lists, objects and commas."""
_ODD_NUMBER: Final = re.compile(rb"[0-9][eE][-+]?[0-9]|[0-9.]{20,}")
"""A number that may take 50 us to decode. A text that looks like such a number counts too."""
_MOST_ODD: Final = 20
_BYTES_FOR_ONE_MORE: Final = 4096


class CostlyJsonError(ValueError):
    """Decoding would take too long."""


def check_cost(text: bytes) -> None:
    """Raises CostlyJsonError if decoding would take too long."""
    if len(text) > _MOST_FOREIGN_BYTES or units_of(text) > MOST_FOREIGN_UNITS:
        raise CostlyJsonError("it is too large, or holds too many values")
    left = _MOST_ODD + len(text) // _BYTES_FOR_ONE_MORE
    for _ in _ODD_NUMBER.finditer(text):
        left -= 1
        if left < 0:
            raise CostlyJsonError("it holds too many numbers with exponents or very many digits")


def decode(text: bytes) -> Any:
    """Raises ValueError if the data is not JSON, is nested too deeply, or would take too long to decode."""
    check_cost(text)
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
