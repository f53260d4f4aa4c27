"""The canonical prompt: the bytes that a request's prefix is hashed from.

Invariants:
- A conversation's bytes are a byte prefix of its next turn's: every section carries its separator in front and nothing follows
  the last one. Content has no length in front, so two prompts that part in mid-message share what comes before.
- Text is UTF-8 and the separators are bytes that UTF-8 never holds, so different texts cannot run together into equal bytes.
- Media is named by a hash of its part, never copied; thinking is left out, because chat templates drop it from later turns.

Equal content gives equal bytes whether it came as a string or as one text part. Knows JSON values, not bodies or paths.
Called by `parse` on each request, and through `next_turn_prompt` when a sampled answer has been read.
"""

from __future__ import annotations

import msgspec
import xxhash

from epp.errors import BadRequestError
from epp.types import ApiKind, InferenceRequest

JsonObject = dict[str, object]
Content = str | list[str | JsonObject] | None

SECTION = b"\xff"
"""Starts a message or any other section."""
BODY = b"\xfe"
"""Ends a section's heading (role, name); its content follows."""
PART = b"\xfd"
"""Between the parts of one content."""
FIELD = b"\xfc"
"""Before a field that is not plain text: a name, a tool call, a tool's result."""
OPAQUE = b"\xfb"
"""Before what stands for something else: the hash of a picture, the id of a stored conversation."""

_HEADINGS = {
    role: SECTION + role.encode() + BODY for role in ("system", "user", "assistant", "tool", "developer")
}
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THINKING = frozenset({"thinking", "redacted_thinking", "reasoning"})
_ABSENT = frozenset({b"", b"null", b"[]", b"{}"})


def heading(role: str, *, name: str | None = None, answers: str | None = None) -> bytes:
    """What goes before a message's content: its role, its author's name, the tool call that it answers."""
    known = _HEADINGS.get(role)
    if known is not None and not name and not answers:
        return known
    fields = [SECTION + role.encode()]
    if name:
        fields.append(b"name=" + name.encode())
    if answers:
        fields.append(b"call=" + answers.encode())
    return FIELD.join(fields) + BODY


def section(label: str, value: bytes) -> bytes:
    """A part of the prompt that is no message, such as the list of tools. No role can equal its heading."""
    return SECTION + FIELD + label.encode() + BODY + value


def present(raw: msgspec.Raw) -> bytes:
    """A field's JSON as it was sent; empty when there is nothing in it."""
    value = bytes(raw)
    return b"" if value in _ABSENT else value


def raw_section(label: str, raw: msgspec.Raw) -> bytes:
    """A section of JSON as it was sent, if any: other white space costs a hit, not a fault."""
    value = present(raw)
    return section(label, value) if value else b""


def raw_call(label: bytes, raw: msgspec.Raw) -> bytes:
    """A message's tool calls as they were sent. They follow the content, as the answer's text came first."""
    value = present(raw)
    return b"" if not value else PART + FIELD + label + FIELD + value


def content_bytes(content: Content, *, where: str) -> bytes:
    """A message's content; `where` names the field for the error message."""
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode()
    return parts_bytes(content, where=where)


def value_bytes(value: object, *, where: str) -> bytes:
    """The same for a value whose type the decoder did not check."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):
        return parts_bytes(value, where=where)
    raise bad_field(where, "must be a string or a list of content parts")


def parts_bytes(parts: list[str | JsonObject], *, where: str) -> bytes:
    rendered = []
    for position, part in enumerate(parts):
        if isinstance(part, str):
            rendered.append(part.encode())
        elif not isinstance(part, dict):
            raise bad_field(f"{where}[{position}]", "must be a string or an object with a `type`")
        elif (said := _part_bytes(part, where=f"{where}[{position}]")) is not None:
            rendered.append(said)
    return PART.join(rendered)


def _part_bytes(part: JsonObject, *, where: str) -> bytes | None:
    """None for thinking, which is no part of later prompts."""
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise bad_field(f"{where}.type", "must be a string")
    if kind in _THINKING:
        return None
    text_key = _TEXT_KEYS.get(kind)
    if text_key is not None:
        text = part.get(text_key)
        if not isinstance(text, str):
            raise bad_field(f"{where}.{text_key}", "must be a string")
        return text.encode()
    if kind == "tool_use":
        call = (text_or_json(part.get("name", "")), text_or_json(part.get("input")))
        return FIELD + b"tool_use" + FIELD + FIELD.join(call)
    if kind == "tool_result":
        return FIELD + b"tool_result" + FIELD + value_bytes(part.get("content"), where=f"{where}.content")
    return FIELD + kind.encode() + fingerprint(part)


def item_bytes(item: JsonObject, *, where: str) -> bytes:
    """An item of the responses API's `input`: a message, or a tool call, its output, or something only hashed."""
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise bad_field(f"{where}.type", "must be a string")
    if kind in _THINKING:
        return b""
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise bad_field(f"{where}.role", 'must be a string such as "user"')
        return heading(role) + value_bytes(item.get("content"), where=f"{where}.content")
    known = [text_or_json(item[key]) for key in ("name", "arguments", "input") if key in item]
    output = item.get("output")
    if isinstance(output, str | list):
        known.append(value_bytes(output, where=f"{where}.output"))
    return section(kind, FIELD.join(known) if known else fingerprint(item))


def fingerprint(part: JsonObject) -> bytes:
    """Names a part by hash: its URL or data counts, the order of its keys and cache marks do not."""
    told = {key: value for key, value in part.items() if key not in _INCIDENTAL}
    return digest(msgspec.json.encode(told, order="sorted"))


_INCIDENTAL = frozenset({"cache_control", "id", "status"})
"""Clients move cache marks from turn to turn, and servers add ids: none of it is rendered into the prompt."""


def digest(data: bytes) -> bytes:
    return OPAQUE + xxhash.xxh3_128_hexdigest(data).encode()


def text_or_json(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value, order="sorted")


def bad_field(where: str, fault: str) -> BadRequestError:
    return BadRequestError(f"Field `{where}` {fault}.", reason="bad_field")


def next_turn_prompt(request: InferenceRequest, answer_text: str) -> bytes | None:
    """The canonical bytes that the next turn will start with, once the answer has been appended to the request.

    The start of an answer gives the start of those bytes. None where the next turn cannot be foreseen: the server keeps
    responses' conversations, token ids have no text, and nothing follows an embedding.
    """
    answer = answer_text.encode("utf-8", "replace")
    if request.kind in (ApiKind.CHAT, ApiKind.MESSAGES):
        return b"".join((request.prompt, heading("assistant"), answer))
    if request.kind is ApiKind.COMPLETIONS and not request.token_ids:
        return request.prompt + answer
    return None
