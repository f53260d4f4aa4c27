"""Estimates the work of reading a body before anything is decoded. A body that would take too long is not
read at all.

A JSON decoder takes a hundred times as long for a body of brackets as for a text of the same size, and a
hundred times as much memory. So one pass over the bytes counts what the body holds, and an estimate in
nanoseconds follows from the counts. A body is read if the estimate is at most ten times the time of plain
text of its size, and at most the time for which the event loop may be held. The work of `parse` for each
counted item must stay within the price of this item (tests/property/request/test_request_cost.py).

The prices are those of a core of 2024. They are the same on every machine, so that either every replica reads
a body or none does. Pure. Called by `parse`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from epp.request import jsontext
from epp.request.jsontext import PlainChat, plain_chat

PLAIN_NS: Final = 0.6
"""Time for one byte of plain text, up to the chain of hashes."""
_FLOOR_NS: Final = 1_000_000
"""Every request may cost this much, however short it is. The picker needs nearly as much time to transport
it."""
_TIMES_PLAIN: Final = 10
_LONGEST_NS: Final = 12_000_000
"""Nothing may hold the loop for more than 20 ms, so this leaves a margin of two fifths."""

_BYTE_NS: Final = 1.5 if jsontext.COMPILED else 3.0
_UNIT_NS: Final = 25 if jsontext.COMPILED else 60
"""Time for each string, list, object and comma: three passes of the decoder, or without C a number as a
Python object."""
_CONTAINER_NS: Final = 1200
"""Time for each message, part of its content, or prompt of a batch. Each becomes a Python object."""
_ITEM_NS: Final = 150
"""Time for each string in these, and for each number in the place of a part."""
_ESCAPE_NS: Final = 10

SMALL_BYTES: Final = 4096
"""A body of this size cannot cost more than every request may cost."""
_MOST_UNITS: Final = _LONGEST_NS // _UNIT_NS
"""Counting stops here. A body with so many units is too costly, whatever else it contains."""


_MOST_BYTES: Final = _LONGEST_NS / _BYTE_NS
"""A longer body is too costly, whatever it contains."""


class Weight(Struct, frozen=True):
    """What a body contains. Counting stops when the body is already too costly."""

    size_bytes: int
    units: int
    """Number of strings, lists, objects and commas."""
    containers: int = 0
    """Upper bound of the lists and objects that `parse` renders."""
    items: int = 0
    """Upper bound of the strings in these, and of numbers in the place of a part."""
    escapes: int = 0
    model: bytes = b""
    """The value of the body's `model` as JSON. Empty: not found, or longer than a name may be."""

    @property
    def estimate_ns(self) -> float:
        return (
            self.size_bytes * _BYTE_NS
            + self.units * _UNIT_NS
            + self.containers * _CONTAINER_NS
            + self.items * _ITEM_NS
            + self.escapes * _ESCAPE_NS
        )

    @property
    def too_costly(self) -> bool:
        allowed = min(_FLOOR_NS + _TIMES_PLAIN * PLAIN_NS * self.size_bytes, _LONGEST_NS)
        return self.estimate_ns > allowed


_MOST_MODEL_BYTES: Final = 8192


def weigh(body: bytes | memoryview) -> Weight:
    """Count what the body contains in one pass: 0.1 ns for a byte of text, 3 ns for any other byte."""
    if len(body) <= SMALL_BYTES:
        return Weight(size_bytes=len(body), units=0)
    if not jsontext.COMPILED:
        return _weighed_without_c(body)
    units, containers, items, escapes, start, end = jsontext.weigh(body, _MOST_UNITS)
    named = 0 <= start < end <= start + _MOST_MODEL_BYTES
    return Weight(
        size_bytes=len(body),
        units=units,
        containers=containers,
        items=items,
        escapes=escapes,
        model=bytes(body[start:end]) if named else b"",
    )


def cheap_chat(body: bytes | memoryview) -> PlainChat | None:
    """Read a plain chat in one pass, which also counts what `weigh` would count.
    None: it is no plain chat, or too costly.
    """
    size = len(body)
    chat = plain_chat(body, _MOST_UNITS) if size <= _MOST_BYTES else None
    if chat is None or size <= SMALL_BYTES:
        return chat
    return None if Weight(size, chat.units, chat.containers, chat.items, chat.escapes).too_costly else chat


def place_of_model(body: bytes | memoryview) -> tuple[int, int] | None:
    """Where the value of `model` begins and ends, in any body of a readable size. None: not found."""
    if not jsontext.COMPILED:
        return None
    *_, start, end = jsontext.weigh(body, _MOST_UNITS)
    return (start, end) if 0 <= start < end else None


def _weighed_without_c(given: bytes | memoryview) -> Weight:
    """The same by searches of the whole body. These do not show nesting, so every list and object counts as
    rendered.
    """
    if len(given) * _BYTE_NS > _LONGEST_NS:
        return Weight(size_bytes=len(given), units=0)
    body = bytes(given)
    quotes, escapes = body.count(b'"'), body.count(b"\\")
    if quotes + escapes > _MOST_UNITS:
        return Weight(size_bytes=len(body), units=quotes + escapes)
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"") if escapes else body
    outside = b"".join(bare.split(b'"')[::2])
    containers, items = outside.count(b"{") + outside.count(b"["), quotes // 2
    return Weight(
        size_bytes=len(body),
        units=items + containers + outside.count(b","),
        containers=containers,
        items=items,
        escapes=escapes,
    )
