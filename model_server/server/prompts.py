"""Reads prompts from request bodies: first counts them as bytes, then decodes them and cuts them into tokens.

Every part of a body that may be long stays raw JSON. Each part is measured first (bytes, commas, braces), at
about 2 ns a byte, and refused if it cannot fit the model's length. So no body makes many objects or tokens
that are then thrown away. Caller: the request reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from model_server.core.request import TokenId
from model_server.server.errors import ApiError, TooLongError
from model_server.text.language import ChatMessage, ChatTemplateError, Language, UnknownTokenError
from model_server.text.pictures import picture_text

MAX_PROMPTS = 256
MAX_LENGTHS = 16
"""All prompts of one request together may have this many times the tokens that the model takes at once."""
ABSENT = msgspec.Raw()
"""Stands for a field that the client left out."""
_MAX_OPTION_BYTES = 64 * 1024
_MAX_COUNTED_CHARACTERS = 256 * 1024
"""/tokenize counts a text up to this length even if the model's own length is shorter, since this is its
purpose.
"""
_LONGEST_ESCAPE_BYTES = 6
r"""The most bytes of one escape in JSON, as in \u00e9. A character outside the first plane takes two
escapes.
"""
_MOST_JSON_MARKS = 8
"""On average over a text, no tokenizer packs more brackets and commas of JSON into one token than this."""
_CALL_PARTS = ("tool_use", "tool_result")
_PICTURES = ("image_url", "image", "input_image")
_MOST_PICTURES = 100
"""A few bytes of a picture may become 49,152 characters of a prompt."""
PARTS = frozenset({"text", "input_text", "output_text", *_PICTURES})
"""The parts of a message that are neither calls nor thoughts."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_LIST_START = re.compile(rb"\[\s*+(.)", re.DOTALL)
FAULT_PLACE = re.compile(r" - at `\$(\S*)`$")
MISSING_FIELD = re.compile(r"missing required field `(\w+)`")
_ROLE = re.compile(r"[a-z_]{1,24}")
_ANY_JSON = msgspec.json.Decoder(float_hook=float)
"""The decoder has a `float_hook`, because msgspec's own way takes 10 us for a number like 1e-310."""

Decoded = TypeVar("Decoded")


class _Source(msgspec.Struct):
    url: str = ""
    data: str = ""


class Part(msgspec.Struct, omit_defaults=True):
    """A text or a picture, or a call or its result as Anthropic's API has them."""

    type: str
    text: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = ABSENT
    content: str | list[Part] | None = None
    image_url: str | _Source | None = None
    source: _Source | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: msgspec.Raw = ABSENT


class Conversation(Protocol):
    """The input of the chat template, from any kind of body."""

    messages: msgspec.Raw
    tools: msgspec.Raw
    chat_template_kwargs: msgspec.Raw
    add_generation_prompt: bool | None
    continue_final_message: bool | None


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


def given(raw: msgspec.Raw) -> bool:
    """Return whether the body has the field with a value other than null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")


def decoded(
    raw: msgspec.Raw | bytes, kind: type[Decoded] | Any, *, param: str, any_json: bool = False
) -> Decoded:
    """Return the decoded field. The ApiError names the field and the place in it."""
    try:
        found = _ANY_JSON.decode(raw) if any_json else None
        value: Decoded = msgspec.convert(found, kind) if any_json else msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError(f"{param} cannot be read: {error}", param=_place(param, str(error))) from error
    return value


def option(raw: msgspec.Raw, kind: type[Decoded] | Any, *, param: str) -> Decoded | None:
    """Return a field whose sensible values are all small. Raise ApiError if the value is large."""
    if not given(raw):
        return None
    if len(memoryview(raw)) > _MAX_OPTION_BYTES:
        raise ApiError(f"{param} has more than {_MAX_OPTION_BYTES:,} bytes, which is the limit.", param=param)
    value: Decoded = decoded(raw, kind, param=param)
    return value


class PromptReader:
    """Reads prompts for one model, with its tokenizer and length. `pictures`: a made-up model takes them."""

    def __init__(self, language: Language, *, max_len_tokens: int, pictures: bool) -> None:
        self._pictures = pictures
        self._language = language
        self._max_len_tokens = max_len_tokens
        self._max_characters = max_len_tokens * language.longest_token_characters

    def completion(self, raw: msgspec.Raw) -> list[list[TokenId]]:
        """Read a string, token ids, or a list of either."""
        first, second = _first_marks(raw)
        if first not in (b'"', b"["):
            raise ApiError("prompt must be a string, token ids, or a list of either.", param="prompt")
        if first == b'"':
            prompts = [self._text(raw)]
        elif second == b'"':
            prompts = self._cut(self._texts(raw))
        elif second == b"[":
            prompts = self._id_lists(raw)
        else:
            prompts = [self._ids(raw, param="prompt")]
        if not all(prompts):
            raise ApiError("prompt must not be empty.", param="prompt")
        return prompts

    def counted(self, raw: msgspec.Raw) -> list[TokenId]:
        """Return the tokens of a text, for a client that counts them. The text may be longer than the model's
        length.
        """
        return self._text(raw, at_least=_MAX_COUNTED_CHARACTERS)

    def conversation(self, body: Conversation) -> list[TokenId]:
        messages = self._messages(body.messages)
        calls = (message.tool_calls for message in messages)
        raws = [raw for raw in (*calls, body.tools, body.chat_template_kwargs) if given(raw)]
        contents = self._contents(messages)
        self._check_characters(sum(map(len, contents)) + sum(len(memoryview(raw)) for raw in raws))
        self._check_marks(raws)
        tools = _json(body.tools, list[dict[str, Any]], param="tools")
        variables = _json(body.chat_template_kwargs, dict[str, Any], param="chat_template_kwargs") or {}
        plain = [
            ChatMessage(
                message.role, content, tuple(_json(message.tool_calls, list[Any], param="messages") or ())
            )
            for message, content in zip(messages, contents, strict=True)
        ]
        try:
            return self._language.encode_chat(plain, tools=tools, variables={**variables, **_named(body)})
        except ChatTemplateError as error:
            raise ApiError(str(error)[:1000], param="messages") from error

    def text_of(self, raw: msgspec.Raw) -> str:
        """Return the text of token ids."""
        tokens = self._ids(raw, param="tokens", at_least=_MAX_COUNTED_CHARACTERS)
        try:
            return self._language.decode(tokens)
        except UnknownTokenError as error:
            raise ApiError(str(error), param="tokens") from error

    def turns(self, raw: msgspec.Raw, kind: type[Decoded] | Any, *, param: str) -> Decoded:
        """Return messages or input items (or a text). Each turn, call and result is at least one token."""
        self._check_bytes(raw, self._max_characters)
        if bytes(raw).count(b"{") > _MOST_JSON_MARKS * self._max_len_tokens:
            self._refuse("the parts of the messages")
        found: Any = decoded(raw, kind, param=param)
        turns = found if isinstance(found, list) else []
        lists = [turn.content for turn in turns if isinstance(turn.content, list)]
        count = len(turns) + sum(part.type in _CALL_PARTS for parts in lists for part in parts)
        if count > self._max_len_tokens:
            self._refuse(f"the conversation's {count} messages, calls and results")
        return found  # type: ignore[no-any-return]  # of the type `kind`

    def _contents(self, messages: Sequence[Message]) -> list[str]:
        lists = [[Part("text", c)] if isinstance(c := m.content, str) else c or [] for m in messages]
        if sum(part.type in _PICTURES for parts in lists for part in parts) > _MOST_PICTURES:
            raise ApiError(f"One request may have at most {_MOST_PICTURES} pictures.", param="messages")
        return ["".join(map(self._part_text, parts)) for parts in lists]

    def _part_text(self, part: Part) -> str:
        if part.type in ("thinking", "redacted_thinking"):
            return ""  # as templates leave out earlier thoughts
        if part.type in _PICTURES and self._pictures and (sent := part.image_url or part.source):
            return picture_text(sent if isinstance(sent, str) else sent.url or f";base64,{sent.data}")
        if part.type not in PARTS or part.type in _PICTURES or part.text is None:
            kinds = "text parts and pictures" if self._pictures else "text parts"
            raise ApiError(f"This model takes {kinds} only.", param="messages")
        return part.text

    def _messages(self, raw: msgspec.Raw) -> list[Message]:
        messages: list[Message] = self.turns(raw, list[Message], param="messages")
        if not messages:
            raise ApiError("messages must not be empty.", param="messages")
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise ApiError(f"{message.role[:50]!r} is not a role.", param="messages")
        return [each for message in messages for each in _apart(message)]

    def _text(self, raw: msgspec.Raw, *, at_least: int = 0) -> list[TokenId]:
        longest = max(self._max_characters, at_least)
        self._check_bytes(raw, longest)
        text: str = decoded(raw, str, param="prompt")
        self._check_characters(len(text), longest)
        return self._language.encode(text)

    def _texts(self, raw: msgspec.Raw) -> list[str]:
        """Return the texts of many prompts, which are counted before the first one is decoded."""
        strings = _STRING.finditer(memoryview(raw))
        if sum(1 for _ in islice(strings, MAX_PROMPTS + 1)) > MAX_PROMPTS:
            raise _too_many()
        self._check_bytes(raw, MAX_LENGTHS * self._max_characters)
        texts: list[str] = decoded(raw, list[str], param="prompt")
        self._check_characters(max(map(len, texts)))
        self._check_characters(sum(map(len, texts)), MAX_LENGTHS * self._max_characters)
        return texts

    def _cut(self, texts: list[str]) -> list[list[TokenId]]:
        """Return the tokens of the texts. Stop at the first text that makes the sum of tokens too large."""
        room = MAX_LENGTHS * self._max_len_tokens
        prompts = []
        for text in texts:
            prompts.append(self._language.encode(text))
            room -= len(prompts[-1])
            if room < 0:
                raise ApiError(
                    f"All prompts of one request together may have at most {MAX_LENGTHS} times the model's {self._max_len_tokens} "
                    "tokens. Send several smaller requests.",
                    param="prompt",
                )
        return prompts

    def _ids(self, raw: msgspec.Raw, *, param: str, at_least: int = 0) -> list[TokenId]:
        whole = bytes(raw)
        count = whole.count(b",") + 1
        if count > max(self._max_len_tokens, at_least):
            self._refuse(f"the list's {count} tokens", param=param)
        return decoded(whole, _TokenIds, param=param)

    def _id_lists(self, raw: msgspec.Raw) -> list[list[TokenId]]:
        whole = bytes(raw)
        if whole.count(b"[") - 1 > MAX_PROMPTS:
            raise _too_many()
        if whole.count(b",") > MAX_LENGTHS * self._max_len_tokens:
            self._refuse("the lists' tokens")
        return decoded(whole, list[_TokenIds], param="prompt")

    def _check_bytes(self, raw: msgspec.Raw, most_characters: int) -> None:
        size = len(memoryview(raw))
        if size > _LONGEST_ESCAPE_BYTES * most_characters + _MAX_OPTION_BYTES:
            self._refuse(f"the prompt's {size} bytes")

    def _check_characters(self, count: int, longest: int | None = None) -> None:
        """Check a text before it is cut into tokens, which takes seconds for a long text."""
        if count > (self._max_characters if longest is None else longest):
            self._refuse(f"the prompt's {count} characters")

    def _check_marks(self, raws: Iterable[msgspec.Raw]) -> None:
        marks = sum(bytes(raw).count(mark) for raw in raws for mark in (b",", b"[", b"{"))
        if marks > _MOST_JSON_MARKS * self._max_len_tokens:
            self._refuse(f"the {marks} values of tools, tool calls and template variables")

    def _refuse(self, what: str, *, param: str = "prompt") -> None:
        raise TooLongError(
            f"This model's maximum context length is {self._max_len_tokens} tokens, and {what} cannot fit into it. "
            "Shorten the prompt.",
            param=param,
        )


def _apart(message: Message) -> list[Message]:
    """Return the message with its calls beside its text, after a message of its own for each result."""
    parts = message.content if isinstance(message.content, list) else []
    if all(part.type not in _CALL_PARTS for part in parts):
        return [message]
    try:
        calls = [
            function_call(part.id, part.name, bytes(part.input).decode() or "{}")
            for part in parts
            if part.type == "tool_use"
        ]
    except UnicodeDecodeError as error:
        raise ApiError(f"messages cannot be read: {error}", param="messages") from error
    texts = [part for part in parts if part.type not in _CALL_PARTS]
    results = [Message("tool", part.content) for part in parts if part.type == "tool_result"]
    if not texts and not calls:
        return results
    raw = msgspec.Raw(msgspec.json.encode(calls)) if calls else ABSENT
    return [*results, Message(message.role, list(texts), raw)]


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as it stands in `tool_calls` of a chat."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _named(body: Conversation) -> dict[str, Any]:
    """Return the values of template variables that have their own fields in the body."""
    named = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    return {name: value for name, value in named.items() if value is not None}


def _json(raw: msgspec.Raw, kind: Any, *, param: str) -> Any:
    """Return the field, which may hold any JSON of the type `kind`. Return None if the field is absent."""
    return decoded(raw, kind, param=param, any_json=True) if given(raw) else None


def _first_marks(raw: msgspec.Raw) -> tuple[bytes, bytes]:
    """Return the first character of a value, and for a list also the first character inside."""
    view = memoryview(raw)
    found = _LIST_START.match(view)
    return bytes(view[:1]), found[1] if found else b""


def _too_many() -> ApiError:
    return ApiError(f"One request may have at most {MAX_PROMPTS} prompts.", param="prompt")


def _place(param: str, message: str) -> str:
    """Return the place of the error in the field, as msgspec writes it."""
    fault, missing = FAULT_PLACE.search(message), MISSING_FIELD.search(message)
    return param + (fault[1] if fault else "") + (f".{missing[1]}" if missing else "")
