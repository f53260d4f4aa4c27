"""JSON strings to the UTF-8 of their text, without making a `str` on the way,
and arrays of token ids to their numbers.

A long text that is not all ASCII costs CPython 3.11 a nanosecond for each character to encode, and as much to
decode: 0.9 ms for 400 KB, half of what such a request cost the picker; and a `str` takes four bytes for each
letter as soon as there is one emoji in it. `_jsontext.c` works on the bytes directly, in 0.1 ms. It returns
None for everything that it does not know for certain, so that only one decoder judges errors. If the picker
was installed without a C compiler, every answer is None: the results are the same, but take longer, and
`COMPILED` says so. Called by `canonical`, `prompts` and `parse`.
"""

from __future__ import annotations

import sys
from array import array
from typing import NamedTuple

import msgspec
from msgspec import Raw

try:
    from epp.request._jsontext import continued, ids_of, text_of, weigh, weighed_chat
except ImportError:
    COMPILED = False

    def continued(text: bytes | memoryview, step: int, /) -> tuple[int, int]:
        sample = bytes(text[::step])
        return len(sample), len(sample) - len(sample.translate(None, _CONTINUATION))

else:
    COMPILED = True

__all__ = [
    "COMPILED",
    "PlainChat",
    "continued",
    "first_byte",
    "plain_chat",
    "plain_text",
    "text_bytes",
    "token_bytes",
    "weigh",
]

_CONTINUATION = bytes(range(0x80, 0xC0))
_QUOTE = ord('"')
_DECODE_TEXT = msgspec.json.Decoder(str)
_DECODE_IDS = msgspec.json.Decoder(list[int])


class PlainChat(NamedTuple):
    """A body of the chat API whose prompt holds only texts, as in nearly all chats."""

    model: str
    prompt: bytes
    """The canonical prompt."""
    stream: int
    include_usage: int
    max_tokens: int
    """Negative: the body does not say it."""
    units: int
    """This and the rest: what `weigh` counts."""
    containers: int
    items: int
    escapes: int


def plain_chat(body: bytes | memoryview, most_units: int = sys.maxsize) -> PlainChat | None:
    """Read and weigh the whole body in one pass. None: the ordinary decoder must read it, or it has more
    units than `most_units`.
    """
    found = weighed_chat(body, most_units) if COMPILED else None
    return None if found is None else PlainChat._make(found)


def plain_text(value: Raw) -> bytes | None:
    """The UTF-8 of one JSON value that is a string. None: it is no string, or not clearly well formed."""
    return text_of(value) if COMPILED else None


def text_bytes(value: Raw) -> bytes | None:
    """The UTF-8 of one JSON value that is a string. None: it is no string. Raises DecodeError if the string
    is malformed.
    """
    text = plain_text(value)
    if text is not None or first_byte(value) != _QUOTE:
        return text
    return _DECODE_TEXT.decode(value).encode()


def token_bytes(value: Raw) -> bytes:
    """A JSON array of token ids, as four little-endian bytes each. Raises ValidationError or OverflowError if
    it is no such array.
    """
    packed = ids_of(value) if COMPILED else None
    if packed is None:
        return _little_endian(array("I", _DECODE_IDS.decode(value)))
    return packed if sys.byteorder == "little" else _little_endian(array("I", packed))


def first_byte(value: Raw) -> int:
    """The first byte of a JSON value, which shows its kind. 0: there is none."""
    view = memoryview(value)
    return view[0] if view else 0


def _little_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
