"""Reads a request body once: which API, which model, the canonical prompt, and the few fields that routing uses.

Strict about what makes the prompt, lenient about the rest, as the model servers are: a number written as a string passes, an
unknown field passes, and a body that is no known API passes as `ApiKind.OTHER`. The body itself goes on unchanged, so what
is read here decides only the route. Nothing but BadRequestError leaves this module, whatever the bytes.

Escapes of lone surrogates, which have no UTF-8, are read as U+FFFD: the server may still judge them its own way.
Called by the ext_proc state machine for each request; pure and synchronous.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from epp.errors import BadRequestError
from epp.request import canonical
from epp.request.canonical import Content, JsonObject, bad_field
from epp.request.jsontext import plain_text
from epp.request.names import bounded_name
from epp.request.surrogates import replace_lone
from epp.types import ApiKind, InferenceRequest

_NO_RAW = Raw(b"")
_BOM = b"\xef\xbb\xbf"

Body = bytes | memoryview
"""A request's, as it came."""


class _StreamOptions(Struct, gc=False):
    include_usage: bool | None = None


class _Body(Struct, gc=False):
    model: str | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _Message(Struct, gc=False):
    role: str
    content: Raw = _NO_RAW
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Raw = _NO_RAW
    function_call: Raw = _NO_RAW


class _Chat(_Body, gc=False):
    messages: list[_Message] | None = None
    tools: Raw = _NO_RAW
    chat_template: Raw = _NO_RAW
    chat_template_kwargs: Raw = _NO_RAW
    documents: Raw = _NO_RAW
    reasoning_effort: Raw = _NO_RAW
    add_special_tokens: Raw = _NO_RAW
    truncate_prompt_tokens: Raw = _NO_RAW
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Completions(_Body, gc=False):
    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: Raw = _NO_RAW
    add_special_tokens: Raw = _NO_RAW
    truncate_prompt_tokens: Raw = _NO_RAW
    max_tokens: int | None = None


class _Embeddings(_Body, gc=False):
    input: str | list[str | int | list[int]] | None = None
    messages: list[_Message] | None = None


class _Responses(_Body, gc=False):
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    tools: Raw = _NO_RAW
    previous_response_id: str | None = None
    max_output_tokens: int | None = None


class _Messages(_Body, gc=False):
    messages: list[_Message] | None = None
    system: Content = None
    tools: Raw = _NO_RAW
    max_tokens: int | None = None


class _Other(Struct, gc=False):
    model: object = None


_B = TypeVar("_B", bound=_Body)


def _decoder(body: type[_B]) -> msgspec.json.Decoder[_B]:
    # Not strict: 16.0 and "16" are 16 and 1 is true to the model servers; a string field still takes only strings.
    return msgspec.json.Decoder(body, strict=False)


class _Shaping:
    """Fields that change what the server makes of the prompt, but for what they do at its end."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._values = attrgetter(*names)
        self._none = (_NO_RAW,) * len(names)

    def sent(self, body: _Body) -> bytes:
        """Those that are there, as they were sent: a JSON object, or nothing, as with nearly every request."""
        values = self._values(body)
        if values == self._none:
            return b""
        return msgspec.json.encode(
            {name: raw for name, raw in zip(self._names, values, strict=True) if raw is not _NO_RAW}
        )


_SHAPING_COMPLETIONS = _Shaping("add_special_tokens", "truncate_prompt_tokens")
_SHAPING_CHAT = _Shaping(
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "truncate_prompt_tokens",
)

_DECODE_CHAT = _decoder(_Chat)
_DECODE_COMPLETIONS = _decoder(_Completions)
_DECODE_EMBEDDINGS = _decoder(_Embeddings)
_DECODE_RESPONSES = _decoder(_Responses)
_DECODE_MESSAGES = _decoder(_Messages)
_DECODE_CONTENT = msgspec.json.Decoder(Content, strict=False)
_DECODE_OTHER = msgspec.json.Decoder(_Other)


def parse_request(path: str, body: Body) -> InferenceRequest:
    """Read a body sent to `path`; its ending names the API, so a gateway's prefix and a query string do no harm.

    BadRequestError when the path is one of the known APIs and the body is not what that API asks for.
    """
    if not body:
        return InferenceRequest(kind=ApiKind.OTHER)
    if body[: len(_BOM)] == _BOM:
        body = body[len(_BOM) :]
    plain = path.partition("?")[0].rstrip("/")
    for ending, parse in _APIS:
        if plain.endswith(ending):
            return _parse_known(parse, body)
    return _parse_other(body)


def _parse_known(parse: Callable[[Body], InferenceRequest], body: Body) -> InferenceRequest:
    try:
        try:
            return parse(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            repaired = replace_lone(body)
            if repaired == body:
                raise
            return parse(repaired)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequestError(f"The body is not valid JSON: {error}.", reason="bad_json") from error
    except UnicodeDecodeError as error:
        raise BadRequestError(
            "The body is not valid UTF-8; send JSON in UTF-8.", reason="bad_json"
        ) from error
    except RecursionError as error:
        raise BadRequestError("The body's JSON is nested too deeply.", reason="bad_json") from error


def _parse_other(body: Body) -> InferenceRequest:
    try:
        model = _DECODE_OTHER.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        model = ""  # Multipart forms, uploads, somebody else's JSON: routed by load.
    return InferenceRequest(kind=ApiKind.OTHER, model=bounded_name(model) if isinstance(model, str) else "")


def _parse_chat(body: Body) -> InferenceRequest:
    chat = _DECODE_CHAT.decode(body)
    model = _model(chat)
    sections = [canonical.raw_section("tools", chat.tools)]
    _render_messages(sections, chat.messages)
    limit, name = chat.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, name = chat.max_tokens, "max_tokens"
    return _request(
        ApiKind.CHAT,
        chat,
        model=model,
        prompt=b"".join(sections),
        max_tokens=_limit(limit, name=name),
        shaping=_SHAPING_CHAT.sent(chat),
    )


def _parse_messages(body: Body) -> InferenceRequest:
    asked = _DECODE_MESSAGES.decode(body)
    model = _model(asked)
    sections = [canonical.raw_section("tools", asked.tools)]
    if asked.system is not None:
        sections += (canonical.heading("system"), canonical.content_bytes(asked.system, where="system"))
    _render_messages(sections, asked.messages)
    max_tokens = _limit(asked.max_tokens, name="max_tokens")
    return _request(ApiKind.MESSAGES, asked, model=model, prompt=b"".join(sections), max_tokens=max_tokens)


def _parse_responses(body: Body) -> InferenceRequest:
    asked = _DECODE_RESPONSES.decode(body)
    model = _model(asked)
    sections = []
    if asked.previous_response_id:
        # The real prefix is in the server's memory. The id in front keeps these bytes from matching anybody else's.
        sections.append(canonical.section("previous", canonical.OPAQUE + asked.previous_response_id.encode()))
    sections.append(canonical.raw_section("tools", asked.tools))
    if asked.instructions is not None:
        sections += (canonical.heading("system"), asked.instructions.encode())
    if isinstance(asked.input, str):
        sections += (canonical.heading("user"), asked.input.encode())
    elif asked.input:
        for position, item in enumerate(asked.input):
            sections.append(canonical.item_bytes(item, where=f"input[{position}]"))
    elif not asked.previous_response_id:
        raise BadRequestError(
            "`input` is missing or empty: send a string or a list of items.", reason="no_input"
        )
    max_tokens = _limit(asked.max_output_tokens, name="max_output_tokens")
    return _request(ApiKind.RESPONSES, asked, model=model, prompt=b"".join(sections), max_tokens=max_tokens)


def _parse_completions(body: Body) -> InferenceRequest:
    asked = _DECODE_COMPLETIONS.decode(body)
    model = _model(asked)
    embeds = canonical.present(asked.prompt_embeds)
    max_tokens = _limit(asked.max_tokens, name="max_tokens")
    if asked.prompt is None and embeds:
        prompt = canonical.section("embeds", canonical.digest(embeds))
        return _request(ApiKind.COMPLETIONS, asked, model=model, prompt=prompt, max_tokens=max_tokens)
    if asked.prompt is None or asked.prompt == []:
        what = "send a string, a list of strings, or token ids"
        raise BadRequestError(f"`prompt` is missing or empty: {what}.", reason="no_prompt")
    prompt, more_bytes, token_ids = _prompts(asked.prompt, where="prompt")
    return _request(
        ApiKind.COMPLETIONS,
        asked,
        model=model,
        prompt=prompt,
        more_prompt_bytes=more_bytes,
        token_ids=token_ids,
        max_tokens=max_tokens,
        shaping=_SHAPING_COMPLETIONS.sent(asked),
    )


def _parse_embeddings(body: Body) -> InferenceRequest:
    asked = _DECODE_EMBEDDINGS.decode(body)
    model = _model(asked)
    if asked.input is None and asked.messages:
        sections: list[bytes] = []
        _render_messages(sections, asked.messages)
        return _request(ApiKind.EMBEDDINGS, asked, model=model, prompt=b"".join(sections))
    if asked.input is None or asked.input == []:
        what = "send a string, a list of strings, or token ids"
        raise BadRequestError(f"`input` is missing or empty: {what}.", reason="no_input")
    prompt, more_bytes, token_ids = _prompts(asked.input, where="input")
    return _request(
        ApiKind.EMBEDDINGS,
        asked,
        model=model,
        prompt=prompt,
        more_prompt_bytes=more_bytes,
        token_ids=token_ids,
    )


_APIS: tuple[tuple[str, Callable[[Body], InferenceRequest]], ...] = (
    ("/v1/chat/completions", _parse_chat),
    ("/v1/completions", _parse_completions),
    ("/v1/messages", _parse_messages),
    ("/v1/responses", _parse_responses),
    ("/v1/embeddings", _parse_embeddings),
)


def _request(
    kind: ApiKind,
    body: _Body,
    *,
    model: str,
    prompt: bytes,
    more_prompt_bytes: int = 0,
    token_ids: bool = False,
    max_tokens: int | None = None,
    shaping: bytes = b"",
) -> InferenceRequest:
    options = body.stream_options
    return InferenceRequest(
        kind=kind,
        model=model,
        prompt=prompt,
        more_prompt_bytes=more_prompt_bytes,
        token_ids=token_ids,
        opaque=not token_ids and canonical.OPAQUE in prompt,
        cache_salt=bounded_name(body.cache_salt or ""),
        stream=body.stream is True,
        include_usage=options is not None and options.include_usage is True,
        max_tokens=max_tokens,
        shaping=shaping,
    )


def _model(body: _Body) -> str:
    if not body.model:
        raise _no_model()
    return bounded_name(body.model)


def _no_model() -> BadRequestError:
    return BadRequestError(
        "`model` is missing: name the model or adapter to use, as a string.", reason="no_model"
    )


def _limit(value: int | None, *, name: str) -> int | None:
    if value is not None and value < 0:
        raise bad_field(name, "must not be negative")
    return value


def _render_messages(sections: list[bytes], messages: list[_Message] | None) -> None:
    if not messages:
        what = "send a list with at least one message"
        raise BadRequestError(f"`messages` is missing or empty: {what}.", reason="no_messages")
    for position, message in enumerate(messages):
        sections.append(canonical.heading(message.role, name=message.name, answers=message.tool_call_id))
        if message.content is not _NO_RAW:
            text = plain_text(message.content)  # Nearly every message.
            sections.append(_content(message.content, position=position) if text is None else text)
        if message.tool_calls is not _NO_RAW:
            sections.append(canonical.raw_call(b"tool_calls", message.tool_calls))
        if message.function_call is not _NO_RAW:
            sections.append(canonical.raw_call(b"function_call", message.function_call))


def _content(raw: Raw, *, position: int) -> bytes:
    """A message's content that is no plain string: null, a list of parts, or wrong."""
    where = f"messages[{position}].content"
    try:
        content = _DECODE_CONTENT.decode(raw)
    except msgspec.ValidationError as error:
        what, _, inside = str(error).partition(_AT_ROOT)
        raise msgspec.ValidationError(f"{what}{_AT}{where}{inside}") from error
    return canonical.content_bytes(content, where=where)


def _prompts(given: str | list[str | int | list[int]], *, where: str) -> tuple[bytes, int, bool]:
    """The first prompt's bytes, the size of all others, and whether they are token ids."""
    if isinstance(given, str):
        return given.encode(), 0, False
    if isinstance(given[0], int):
        return _tokens_bytes(given, where=where), 0, True
    prompts: list[bytes] = []
    for position, prompt in enumerate(given):
        if type(prompt) is not type(given[0]):
            raise bad_field(
                where, "must hold prompts of one type: all strings, all token ids, or all lists of token ids"
            )
        if isinstance(prompt, str):
            prompts.append(prompt.encode())
        else:
            prompts.append(_tokens_bytes(prompt, where=f"{where}[{position}]"))
    return prompts[0], sum(map(len, prompts)) - len(prompts[0]), isinstance(given[0], list)


def _tokens_bytes(tokens: Iterable[object], *, where: str) -> bytes:
    try:
        packed = array("I", cast("Iterable[int]", tokens))  # array itself judges each value
    except OverflowError:
        raise bad_field(where, "holds a token id out of range (0 to 4294967295)") from None
    except TypeError:
        raise bad_field(where, "must hold prompts of one type: all strings, or all token ids") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


_AT_ROOT = " - at `$"
_AT = _AT_ROOT + "."


def _explained(fault: str) -> BadRequestError:
    """The decoder's complaint in the user's words: ``Expected `str`, got `int` - at `$.model```."""
    what, at, field = fault.partition(_AT)
    if not at:
        return BadRequestError("The body must be a JSON object.", reason="bad_json")
    field = field.rstrip("`")
    if field == "model":
        return _no_model()
    return bad_field(field, f"is not as it should be: {what[:1].lower()}{what[1:]}")
