"""Documents with one value changed, added or left out. Changes of bytes seldom give these, since most
changed bytes are not a document.
"""

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

_DEEP: Final = 1_500
_MOST_BYTES: Final = 40_000
Encode = Callable[[object], bytes]


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _chained(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


_ODD: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**53 + 1,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        1e308,
        -0.5,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        "x",
        "x" * 2_000,
        "\x00",
        "é" * 300,
        "9" * 300,
        "@bool",
        "@int",
        "@time",
        "@float",
        b"",
        b"x" * 9,
        b"\xff" * 8,
    ),
    *(list, dict, lambda: [[]], lambda: [None], lambda: [1, "x"], lambda: {"a": None}, lambda: {"": ""}),
    *(lambda: _nested(60), *(lambda: _nested(_DEEP),) * 4, lambda: _chained(_DEEP)),
)
"""Each function makes a new collection, because values in a document are changed later."""
_TAGS: Final = {"@bool": "!!bool x", "@int": "!!int ''", "@time": "!!timestamp x", "@float": "!!float x"}


def tree_mutants(
    rng: random.Random, documents: Sequence[object], encode: Encode
) -> Callable[[], bytes | None]:
    """Return a function that makes inputs. It returns None where the format cannot write a document."""

    def made() -> bytes | None:
        return changed(rng, rng.choice(documents), encode)[1]

    return made


def changed(rng: random.Random, document: object, encode: Encode) -> tuple[object, bytes | None]:
    """Return a changed copy of a document, and its bytes. None: the format cannot write it."""
    try:
        document = copy.deepcopy(document)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            document = _changed(rng, document)
        data = encode(document)
    except (TypeError, ValueError, OverflowError, RecursionError, struct.error, msgspec.MsgspecError):
        return document, None
    return document, data if len(data) <= _MOST_BYTES else None


def _odd(rng: random.Random) -> Any:
    value = rng.choice(_ODD)
    return value() if callable(value) else value


def _changed(rng: random.Random, document: Any) -> Any:
    places = list(_places(document))
    if not places:
        return _odd(rng)
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0 if isinstance(holder, list):
            holder.insert(rng.choice((len(holder), rng.randrange(len(holder) + 1))), _odd(rng))
        case 0:
            holder[rng.choice(("a", "spec", "metadata", "x" * 100))] = _odd(rng)
        case 1:
            del holder[key]
        case 2 if isinstance(holder, list):
            holder.extend([holder[key]] * rng.choice((1, 3, 100)))
        case _:
            holder[key] = _odd(rng)
    return document


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 2_000:
        holder = waiting.pop()
        keys = (
            list(holder)
            if isinstance(holder, dict)
            else range(len(holder))
            if isinstance(holder, list)
            else ()
        )
        for key in keys:
            found.append((holder, key))
            waiting.append(holder[key])
    return found


def as_msgpack(document: object) -> bytes:
    """Write msgpack. Documents that are nested too deeply for the usual writer have their own writer."""
    try:
        return msgspec.msgpack.encode(document)
    except RecursionError:
        return b"".join(_deep_msgpack(document))


def _deep_msgpack(document: Any) -> list[bytes]:
    pieces: list[bytes] = []
    waiting = [document]
    while waiting:
        _check_size(pieces)
        value = waiting.pop()
        if isinstance(value, list):
            few = len(value) < 16
            pieces.append(bytes((0x90 | len(value),)) if few else b"\xdd" + len(value).to_bytes(4, "big"))
            waiting.extend(reversed(value))
        elif isinstance(value, dict):
            pieces.append(b"\xdf" + len(value).to_bytes(4, "big"))
            for key, inner in reversed(value.items()):
                waiting.extend((inner, key))
        else:
            pieces.append(msgspec.msgpack.encode(value))
    return pieces


def _check_size(pieces: Sequence[object]) -> None:
    """Every piece has at least one byte."""
    if len(pieces) > _MOST_BYTES:
        raise ValueError


def as_protobuf(document: Any) -> bytes:
    """Write a message, given as a list of fields: a number, and a message, bytes or a number as its value."""
    made = bytearray()
    for number, value in document:
        if isinstance(value, int):
            made += _varint(number << 3) + _varint(value)
        else:
            content = as_protobuf(value) if isinstance(value, list) else bytes(value)
            made += _varint(number << 3 | 2) + _varint(len(content)) + content
    return bytes(made)


def _varint(number: int) -> bytes:
    if not 0 <= number < 2**64:
        raise ValueError(number)
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*made, number))


def as_json(document: object) -> bytes:
    """Write JSON of any depth."""
    return "".join(_json(document)).encode("utf-8", "surrogatepass")


def as_yaml(document: object) -> bytes:
    """JSON is YAML too. Some texts stand for values with tags that do not fit."""
    text = "".join(_json(document))
    for mark, tag in _TAGS.items():
        text = text.replace(json.dumps(mark), tag)
    return text.encode("utf-8", "surrogatepass")


class _Said(str):
    """Text that goes into the document as it is."""

    __slots__ = ()


def _json(document: Any) -> list[str]:
    """Write JSON. Documents that are nested too deeply for the usual writer have their own writer."""
    try:
        return [json.dumps(document, default=lambda value: value.decode("latin-1"))]
    except RecursionError:
        return _deep_json(document)


def _deep_json(document: Any) -> list[str]:
    pieces: list[str] = []
    waiting: list[Any] = [document]
    while waiting:
        _check_size(pieces)
        value = waiting.pop()
        if isinstance(value, _Said):
            pieces.append(value)
        elif isinstance(value, list | dict):
            opened, closed = ("[", "]") if isinstance(value, list) else ("{", "}")
            pieces.append(opened)
            waiting.append(_Said(closed))
            inner: list[Any] = []
            for n, each in enumerate(value):
                inner += [_Said(", ")] if n else []
                inner += (
                    [each] if isinstance(value, list) else [_Said(json.dumps(str(each)) + ": "), value[each]]
                )
            waiting.extend(reversed(inner))
        else:
            pieces.append(json.dumps(value.decode("latin-1") if isinstance(value, bytes) else value))
    return pieces
