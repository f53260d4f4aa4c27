"""Decodes foreign JSON into Python values, but only if decoding is quick.

A JSON decoder holds the whole process until it is done. Most JSON takes it 5 ns a byte, but an empty list
takes 100 ns a byte, and a number such as 1e-310 or 1.7976931348623157e308 takes 4 us a byte. So JSON that
would take longer than about 15 ms is refused before it is decoded. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from epp.request.jsontext import weigh

_MOST_BYTES: Final = 2**20
MOST_UNITS: Final = 100_000
"""Most strings, lists, objects and commas."""
_ODD_NUMBER: Final = re.compile(rb"[0-9][eE][-+]?[0-9]|[0-9.]{20,}")
"""A number that may take 50 us to decode. A text that looks like such a number counts too."""
_MOST_ODD: Final = 20
_BYTES_FOR_ONE_MORE: Final = 4096


class CostlyJsonError(ValueError):
    """Decoding would take too long."""


def check_cost(text: bytes) -> None:
    """Raises CostlyJsonError if decoding would take too long."""
    if len(text) > _MOST_BYTES or weigh(text).units > MOST_UNITS:
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
