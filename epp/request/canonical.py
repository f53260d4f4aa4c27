"""The canonical prompt: the bytes from which the prefix of a request is hashed.

Invariants:
- The bytes of a conversation are a byte prefix of the bytes of its next turn, but for thoughts: every section
  begins with its separator, and nothing follows the last section. No length stands before a content, so two
  prompts that differ in the middle of a message share everything before.
- Text is UTF-8, and the separators are bytes that UTF-8 never contains. So different texts cannot join into
  equal bytes.
- Media is named by a hash of its part and never copied.

Equal content gives equal bytes, whether it came as a string or as one text part. JSON values stay as they
were sent. Only values whose text is a part of the prompt are decoded: numbers, pictures and arguments of
tools never become Python objects. What servers leave out of prompts is left out here. Called by `parse`.

Chat templates leave out what the assistant thought before the last message of the user. So thoughts count
only since then, and the answer to the next message makes the chain end where the earlier thoughts began, as
it does in the server's cache.
"""

from typing import Final

import msgspec
import xxhash
from msgspec import Raw, Struct

from epp.base.types import Media
from epp.request._jsontext import text_of
from epp.request.api_fields import ChatMessage
from epp.request.jsontext import NO_RAW, first_byte, text_bytes, token_bytes
from epp.request.media import media_tokens

PromptPiece = bytes | Raw
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
CONTINUING = bytes(range(0x80, 0xC0))
"""The bytes that continue a letter of UTF-8."""

TOOL_RESULT = FIELD + b"tool_result" + FIELD
_TOOL_CALLS = PART + FIELD + b"tool_calls" + FIELD
_FUNCTION_CALL = PART + FIELD + b"function_call" + FIELD

_HEADINGS = {
    role: SECTION + role + BODY for role in (b"system", b"user", b"assistant", b"tool", b"developer")
}
_TEXTS = {
    b"text": "text",
    b"input_text": "text",
    b"output_text": "text",
    b"reasoning_text": "text",
    b"summary_text": "text",
    b"refusal": "refusal",
    b"thinking": "thinking",
}
"""The parts that are texts: their types, and the field with the text."""
_BILLING = b"x-anthropic-billing-header"
"""Servers drop this line from system prompts, because a coding agent changes it with every request. The C
reader of `jsontext` leaves such chats to this module."""
_ABSENT = frozenset({b"", b"null", b"[]", b"{}"})
_LONGEST_ABSENT = 4
_DECODE_LIST = msgspec.json.Decoder(list[Raw])
_DECODE_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_QUOTE, _LIST = ord('"'), ord("[")
_MOST_MEASURED: Final = 16
"""The most media of a prompt whose headers are read."""
_ITEMS = b'"[{]'


class UnfollowedError(Exception):
    """The prompt has a shape that is not known here. Only the server can say whether it is valid."""


class _Part(Struct, gc=False):
    """One part of a content, or one item of the responses API's `input`. Its type decides which of its fields
    are decoded.
    """

    type: Raw = NO_RAW
    text: Raw = NO_RAW
    refusal: Raw = NO_RAW
    thinking: Raw = NO_RAW
    name: Raw = NO_RAW
    input: Raw = NO_RAW
    content: Raw = NO_RAW
    uuid: Raw = NO_RAW
    role: Raw = NO_RAW
    summary: Raw = NO_RAW
    namespace: Raw = NO_RAW
    arguments: Raw = NO_RAW
    output: Raw = NO_RAW


_DECODE_PART = msgspec.json.Decoder(_Part)


def heading(role: bytes, *fields: bytes) -> bytes:
    """Return the heading before a message's content: the role, and the fields that are not empty."""
    if not any(fields):
        return _HEADINGS.get(role) or SECTION + role + BODY
    return FIELD.join((SECTION + role, *filter(None, fields))) + BODY


def label(name: bytes) -> bytes:
    """Return the heading of a part that is not a message, such as the list of tools. No role has this
    heading.
    """
    return SECTION + FIELD + name + BODY


def present(raw: Raw) -> bool:
    return len(memoryview(raw)) > _LONGEST_ABSENT or bytes(raw) not in _ABSENT


def as_sent(front: bytes, raw: Raw) -> list[PromptPiece]:
    """Return JSON as it was sent behind `front`, if any. Other white space costs a hit and does no harm."""
    return [front, raw] if present(raw) else []


def items_of(raw: Raw) -> list[Raw]:
    """Return the items of a JSON array whose first item is a string, a list or an object."""
    if first_byte(raw) != _LIST or first_item(raw) not in _ITEMS:
        raise UnfollowedError
    return _DECODE_LIST.decode(raw)


def first_item(raw: Raw) -> int:
    """Return the first byte of a list's first item. For an empty list, the byte that ends the list."""
    start = bytes(memoryview(raw)[1:65]).lstrip() or bytes(memoryview(raw)[1:]).lstrip()
    return start[0] if start else 0


def content_parts(
    raw: Raw,
    *,
    media: list[Media],
    thoughts: list[bytes] | None = None,
    system: bool = False,
    nested: bool = False,
) -> list[bytes]:
    """Return the parts of a content: a string, a list of parts, or nothing.

    media: gets the guessed tokens of each part that is no text.
    thoughts: gets the texts of thinking parts. None: the server renders these as texts. system: it is a
    system prompt. nested: it is inside a tool's result.
    """
    text = text_bytes(raw)
    if text is not None:
        return [_without_billing(text) if system else text]
    rendered = []
    for part in items_of(raw) if present(raw) else ():
        text = text_bytes(part)
        if text is None:
            text = _part_bytes(part, media=media, thoughts=thoughts, nested=nested)
        if text is not None and system:
            text = _without_billing(text) or None
        if text is not None:
            rendered.append(text)
    return rendered


def _without_billing(text: bytes) -> bytes:
    return text.partition(b"\n")[2] if text.startswith(_BILLING) else text


def _part_bytes(raw: Raw, *, media: list[Media], thoughts: list[bytes] | None, nested: bool) -> bytes | None:
    """Return the part's bytes. None: it leaves none here."""
    part = _DECODE_PART.decode(raw)
    kind = text_bytes(part.type) or (b"text" if present(part.text) else b"")
    if kind in _TEXTS:
        value = getattr(part, _TEXTS[kind])
        text = text_bytes(value)
        if kind == b"thinking" and thoughts is not None:
            thoughts.append(text or b"")
            return None
        if text is not None or not present(value):
            return text
    if kind == b"redacted_thinking":
        return None
    if kind == b"tool_use":
        return FIELD.join((FIELD + b"tool_use", text_or_json(part.name), text_or_json(part.input)))
    if kind == b"tool_result" and not nested:
        return TOOL_RESULT + PART.join(content_parts(part.content, media=media, nested=True))
    media.append(media_tokens(raw, kind=kind, measured=len(media) < _MOST_MEASURED))
    return FIELD + kind + (digest(part.uuid) if present(part.uuid) else fingerprint(raw))


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


_INCIDENTAL = frozenset({"cache_control", "prompt_cache_breakpoint", "id", "status"})
"""Fields that are not rendered into the prompt: clients move cache marks from turn to turn, and servers add
ids."""


def digest(data: PromptPiece) -> bytes:
    return OPAQUE + xxhash.xxh3_128_hexdigest(data).encode()


def text_or_json(raw: Raw) -> bytes:
    text = text_bytes(raw)
    return bytes(raw) if text is None else text


# -- the prompts of a body -----------------------------------------------------------------------------------

_NUMBERS: Final = b"-0123456789"


class Prompts(Struct, frozen=True, gc=False):
    first: bytes = b""
    """The prompt that is matched against the servers' caches."""
    more_bytes: int = 0
    """Size of all other prompts."""
    token_ids: bool = False


def read_prompts(raw: Raw) -> Prompts:
    """Return the prompts of a field with a string, a list of strings, or token ids. Raises UnfollowedError,
    OverflowError or the decoder's errors, if the value is none of these.
    """
    text = text_bytes(raw)
    if text is not None:
        return Prompts(text)
    if not present(raw):
        return Prompts()
    items = first_item(raw) if first_byte(raw) == _LIST else 0
    if items and items in _NUMBERS:
        return Prompts(token_bytes(raw), token_ids=True)
    prompts = items_of(raw)
    kind = first_byte(prompts[0])
    if kind not in (_QUOTE, _LIST) or any(first_byte(prompt) != kind for prompt in prompts):
        raise UnfollowedError
    read = text_bytes if kind == _QUOTE else token_bytes
    first, *more = (read(prompt) or b"" for prompt in prompts)
    return Prompts(first, sum(map(len, more)), token_ids=kind == _LIST)


def render_messages(
    sections: list[PromptPiece], messages: list[ChatMessage] | None, *, media: list[Media], thinks: bool
) -> None:
    """Append the messages, as parts of a canonical prompt, to `sections`. media: as for `content_parts`.
    thinks: the API's thinking parts are thoughts of the assistant, and not texts of the content.
    """
    open_thoughts: list[int] = []
    for message in messages or ():
        role = text_bytes(message.role)
        if role is None:
            raise UnfollowedError
        thoughts: list[bytes] = []
        text = text_of(message.content) if role != b"system" else None
        if text is None:
            parts = content_parts(
                message.content,
                media=media,
                thoughts=thoughts if thinks else None,
                system=role == b"system",
            )
            text = PART.join(parts)
        if role == b"user" and open_thoughts and not _only_results(text, message.content):
            _forget(sections, open_thoughts)
        sections.append(_heading(message, role))
        if role == b"assistant":
            thoughts.append(text_bytes(message.reasoning) or text_bytes(message.reasoning_content) or b"")
            if any(thoughts):
                open_thoughts.append(len(sections))
                sections.append(FIELD + b"reasoning" + FIELD + b"".join(thoughts) + PART)
        sections.append(text)
        # Tool calls stand after the content, because the server wrote the text first.
        if message.tool_calls is not NO_RAW:
            sections += as_sent(_TOOL_CALLS, message.tool_calls)
        if message.function_call is not NO_RAW:
            sections += as_sent(_FUNCTION_CALL, message.function_call)


def _only_results(text: bytes, content: Raw) -> bool:
    """Return whether a user's message only holds results of tools, which servers render as messages of
    tools.
    """
    return text.startswith(TOOL_RESULT) and all(
        part.startswith(TOOL_RESULT) for part in content_parts(content, media=[])
    )


def _forget(sections: list[PromptPiece], places: list[int]) -> None:
    for place in places:
        sections[place] = b""
    places.clear()


def _heading(message: ChatMessage, role: bytes) -> bytes:
    """Return the heading with the author's name and the tool call that the message answers, if any."""
    if message.name is NO_RAW and message.tool_call_id is NO_RAW:
        return heading(role)
    name, answers = text_bytes(message.name), text_bytes(message.tool_call_id)
    return heading(role, b"name=" + name if name else b"", b"call=" + answers if answers else b"")


def render_items(sections: list[PromptPiece], raw: Raw, *, media: list[Media]) -> None:
    """Append the items of the responses API: messages, thoughts, tool calls, outputs of tools. Of any other
    item only a hash counts.
    """
    open_thoughts: list[int] = []
    for each in items_of(raw) if present(raw) else ():
        item = _DECODE_PART.decode(each)
        kind, role = text_bytes(item.type) or b"message", text_bytes(item.role)
        if kind == b"reasoning":
            parts = content_parts(item.content, media=media) or content_parts(item.summary, media=media)
            open_thoughts.append(len(sections))
            sections.append(label(kind) + b"".join(parts) if parts else b"")
        elif kind == b"message" and role is not None:
            if role == b"user":
                _forget(sections, open_thoughts)
            parts = content_parts(item.content, media=media, system=role == b"system")
            sections += (heading(role), PART.join(parts))
        else:
            called = (item.namespace, item.name, item.arguments, item.input)
            known = [text_or_json(part) for part in called if part is not NO_RAW]
            if first_byte(item.output) in b'"[':
                known.append(PART.join(content_parts(item.output, media=media)))
            if not known:
                media.append(Media(texts=1 + len(memoryview(each)) // 4))
            sections += (
                label(kind),
                FIELD.join(known) if known else fingerprint(each),
            )
