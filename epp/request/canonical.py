"""The canonical prompt: the bytes from which the prefix of a request is hashed.

Invariants:
- The bytes of a conversation are a byte prefix of the bytes of its next turn: every section begins with its
  separator, and nothing follows the last section. No length stands before a content, so two prompts that
  differ in the middle of a message share everything before.
- Text is UTF-8, and the separators are bytes that UTF-8 never contains. So different texts cannot join into
  equal bytes.
- Media is named by a hash of its part and never copied. Thinking is left out, because chat templates drop it
  from later turns.

Equal content gives equal bytes, whether it came as a string or as one text part. JSON values stay as they
were sent. Only values whose text is a part of the prompt are decoded: numbers, pictures and arguments of
tools never become Python objects. Called by `parse` for each request.
"""

from __future__ import annotations

import msgspec
import xxhash
from msgspec import Raw, Struct

from epp.base.errors import BadRequestError
from epp.request.jsontext import first_byte, text_bytes

Piece = bytes | Raw
"""Bytes of a prompt. JSON that is part of the prompt as it was sent is copied only when all pieces are
joined."""

SECTION = b"\xff"
"""Starts a message or any other section."""
BODY = b"\xfe"
"""Ends a section's heading (role, name); its content follows."""
PART = b"\xfd"
"""Separates the parts of one content."""
FIELD = b"\xfc"
"""Stands before a field that is not plain text: a name, a tool call, a tool's result."""
OPAQUE = b"\xfb"
"""Stands before a substitute: the hash of a picture, the id of a stored conversation."""

NO_RAW = Raw(b"")

_HEADINGS = {
    role: SECTION + role + BODY for role in (b"system", b"user", b"assistant", b"tool", b"developer")
}
_TEXT_KEYS = {b"text": "text", b"input_text": "text", b"output_text": "text", b"refusal": "refusal"}
_THINKING = frozenset({b"thinking", b"redacted_thinking", b"reasoning"})
_ABSENT = frozenset({b"", b"null", b"[]", b"{}"})
_LONGEST_ABSENT = 4
_DECODE_LIST = msgspec.json.Decoder(list[Raw])
_DECODE_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST, _OBJECT = ord("["), ord("{")
_ITEMS = b'"[{]'


class _Part(Struct, gc=False):
    """One part of a content. Its type decides which of its fields are decoded."""

    type: Raw = NO_RAW
    text: Raw = NO_RAW
    refusal: Raw = NO_RAW
    name: Raw = NO_RAW
    input: Raw = NO_RAW
    content: Raw = NO_RAW


class _Item(Struct, gc=False):
    """One item of the responses API's `input`."""

    type: Raw = NO_RAW
    role: Raw = NO_RAW
    content: Raw = NO_RAW
    name: Raw = NO_RAW
    arguments: Raw = NO_RAW
    input: Raw = NO_RAW
    output: Raw = NO_RAW


_DECODE_PART = msgspec.json.Decoder(_Part)
_DECODE_ITEM = msgspec.json.Decoder(_Item)


def heading(role: bytes, *, name: bytes = b"", answers: bytes = b"") -> bytes:
    """Return the heading before a message's content: role, author's name, the tool call that it answers."""
    known = _HEADINGS.get(role)
    if known is not None and not name and not answers:
        return known
    fields = [SECTION + role]
    if name:
        fields.append(b"name=" + name)
    if answers:
        fields.append(b"call=" + answers)
    return FIELD.join(fields) + BODY


def label(name: bytes) -> bytes:
    """Return the heading of a part that is not a message, such as the list of tools. No role has this
    heading.
    """
    return SECTION + FIELD + name + BODY


def present(raw: Raw) -> bool:
    return len(memoryview(raw)) > _LONGEST_ABSENT or bytes(raw) not in _ABSENT


def raw_section(name: bytes, raw: Raw) -> list[Piece]:
    """Return a section with JSON as it was sent, if any. Other white space costs a hit and does no harm."""
    return [label(name), raw] if present(raw) else []


def raw_call(name: bytes, raw: Raw) -> list[Piece]:
    """Return a message's tool calls, as they were sent. They stand after the content, because the server
    wrote the text first.
    """
    return [PART + FIELD + name + FIELD, raw] if present(raw) else []


def required_text(raw: Raw, *, where: str) -> bytes:
    """Return the text of a field that must be a string. `where` names the field in the error message."""
    text = text_bytes(raw)
    if text is None:
        raise bad_field(where, "must be a string")
    return text


def optional_text(raw: Raw, *, where: str) -> bytes:
    """Return the text of a field that must be a string, or nothing if the field is missing or null."""
    return required_text(raw, where=where) if present(raw) else b""


def items_of(raw: Raw, *, where: str, expected: str) -> list[Raw]:
    """Return the items of a JSON array whose first item is a string, a list or an object."""
    if first_byte(raw) != _LIST:
        raise bad_field(where, expected)
    if first_item(raw) not in _ITEMS:
        raise bad_field(f"{where}[0]", "must be a string or an object with a `type`")
    return _DECODE_LIST.decode(raw)


def first_item(raw: Raw) -> int:
    """Return the first byte of a list's first item. For an empty list, the byte that ends the list."""
    start = bytes(memoryview(raw)[1:65]).lstrip() or bytes(memoryview(raw)[1:]).lstrip()
    return start[0] if start else 0


def content_bytes(raw: Raw, *, where: str, nested: bool = False) -> bytes:
    """Return the bytes of a content: a string, a list of parts, or nothing. nested: it is inside a tool's
    result.
    """
    text = text_bytes(raw)
    if text is not None:
        return text
    if not present(raw):
        return b""
    rendered = []
    parts = items_of(raw, where=where, expected="must be a string or a list of content parts")
    for position, part in enumerate(parts):
        text = text_bytes(part)
        if text is None:
            text = _part_bytes(part, where=f"{where}[{position}]", nested=nested)
        if text is not None:
            rendered.append(text)
    return PART.join(rendered)


def _part_bytes(raw: Raw, *, where: str, nested: bool) -> bytes | None:
    """Return the part's bytes. None for thinking, which later prompts do not contain."""
    if first_byte(raw) != _OBJECT:
        raise bad_field(where, "must be a string or an object with a `type`")
    part = _DECODE_PART.decode(raw)
    kind = b"text" if part.type is NO_RAW else required_text(part.type, where=f"{where}.type")
    if kind in _THINKING:
        return None
    text_key = _TEXT_KEYS.get(kind)
    if text_key is not None:
        return required_text(part.text if text_key == "text" else part.refusal, where=f"{where}.{text_key}")
    if kind == b"tool_use":
        return FIELD.join((FIELD + b"tool_use", _text_or_json(part.name), _text_or_json(part.input)))
    if kind == b"tool_result" and not nested:
        result = content_bytes(part.content, where=f"{where}.content", nested=True)
        return FIELD + b"tool_result" + FIELD + result
    return FIELD + kind + fingerprint(raw)


def item_pieces(raw: Raw, *, where: str) -> list[Piece]:
    """Return the pieces of an item of the responses API's `input`: a message, a tool call, a tool's output,
    or an item of which only a hash counts.
    """
    if first_byte(raw) != _OBJECT:
        raise bad_field(where, "must be an object")
    item = _DECODE_ITEM.decode(raw)
    kind = b"message" if item.type is NO_RAW else required_text(item.type, where=f"{where}.type")
    if kind in _THINKING:
        return []
    if kind == b"message":
        role = text_bytes(item.role)
        if role is None:
            raise bad_field(f"{where}.role", 'must be a string such as "user"')
        return [heading(role), content_bytes(item.content, where=f"{where}.content")]
    known = [_text_or_json(field) for field in (item.name, item.arguments, item.input) if field is not NO_RAW]
    if first_byte(item.output) in b'"[':
        known.append(content_bytes(item.output, where=f"{where}.output"))
    return [label(kind), FIELD.join(known) if known else fingerprint(raw)]


def fingerprint(raw: Raw) -> bytes:
    """Return a hash of a JSON object. All values count, such as the URL or data of a picture. The order of
    the keys and the fields of `_INCIDENTAL` do not count.
    """
    digest = xxhash.xxh3_128()
    for key, value in sorted(_DECODE_FIELDS.decode(raw).items()):
        if key not in _INCIDENTAL:
            digest.update(b"%d %d " % (len(key), len(memoryview(value))))
            digest.update(key.encode())
            digest.update(value)
    return OPAQUE + digest.hexdigest().encode()


_INCIDENTAL = frozenset({"cache_control", "id", "status"})
"""Fields that are not rendered into the prompt: clients move cache marks from turn to turn, and servers add
ids."""


def digest(data: Piece) -> bytes:
    return OPAQUE + xxhash.xxh3_128_hexdigest(data).encode()


def _text_or_json(raw: Raw) -> bytes:
    text = text_bytes(raw)
    return bytes(raw) if text is None else text


def bad_field(where: str, fault: str) -> BadRequestError:
    return BadRequestError(f"Field `{where}` {fault}.", reason="bad_field")
