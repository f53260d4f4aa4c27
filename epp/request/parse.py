"""Reads a request body once: its API, its model, the canonical prompt, and the few fields that routing uses.

This module is strict about fields that make the prompt, and lenient about all others, as the model servers
are: a number written as a string passes, an unknown field passes, and a body of no known API passes as
`ApiKind.OTHER`. The body itself is sent on unchanged, so the result decides only the route. For any bytes,
this module raises no other error than BadRequestError.

Every body is first weighed (`jsontext`). A body that would take too long is returned unread, with the reason.
All other bodies are decoded field by field. A field that is not part of the prompt stays the bytes that were
sent.

Escapes of lone surrogates, which have no UTF-8, are read as U+FFFD. The server may still treat them in its
own way. Called by the ext_proc state machine for each request; pure and synchronous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind, InferenceRequest
from epp.request import canonical
from epp.request.api_fields import (
    DECODE_API_FIELDS,
    DECODE_CHAT,
    DECODE_COMPLETIONS,
    DECODE_EMBEDDINGS,
    DECODE_MESSAGES,
    DECODE_OTHER,
    DECODE_RESPONSES,
    SHAPING_CHAT,
    SHAPING_COMPLETIONS,
    AnyBody,
    ApiFields,
    priority_in,
)
from epp.request.canonical import NO_RAW, Piece, bad_field, content_bytes, optional_text
from epp.request.client_names import name_in
from epp.request.jsontext import (
    MOST_BYTES,
    MOST_UNITS,
    SMALL_BYTES,
    Weight,
    first_byte,
    weigh,
    weighed_chat,
)
from epp.request.prompts import Prompts, read_prompts, render_messages
from epp.request.surrogates import replace_lone

COSTLY: Final = "costly_body"
"""Why a body was not read: reading it would delay all other requests."""

_NULL = Raw(b"null")
_QUOTE = ord('"')
_BOM = b"\xef\xbb\xbf"

Body = bytes | memoryview
"""The body of a request as it came."""


def parse_request(path: str, body: Body) -> InferenceRequest:
    """Read a body sent to `path`. The end of the path names the API, so a gateway's prefix and a query string
    do no harm.

    Without a path the body's fields show the API. A body that fits no API is then routed by load. Raises
    BadRequestError if the path is one of a known API and the body does not fit this API.
    """
    if not body:
        return InferenceRequest(kind=ApiKind.OTHER)
    if body[: len(_BOM)] == _BOM:
        body = body[len(_BOM) :]
    parse = _api(path)[1]
    if parse is _parse_chat and (plain := plain_chat(body)) is not None:
        return plain
    if len(body) > SMALL_BYTES:
        weight = weigh(body)
        if weight.too_costly:
            return _unread(path, body, weight, why=COSTLY)
    if not path:
        return _parse_pathless(body)
    return _parse_other(body) if parse is None else _parse_known(parse, body)


def plain_chat(body: Body) -> InferenceRequest | None:
    """Read a chat whose prompt holds only texts, as nearly all chats do: in one pass, which also counts what
    `weigh` would count.

    None: the ordinary decoder must read the body, or it is too costly.
    """
    size = len(body)
    found = weighed_chat(body, MOST_UNITS) if size <= MOST_BYTES else None
    if found is None:
        return None
    model, prompt, stream, include_usage, max_tokens, units, containers, items, escapes = found
    if size > SMALL_BYTES and Weight(size, units, containers, items, escapes).too_costly:
        return None
    return InferenceRequest(
        kind=ApiKind.CHAT,
        model=model,
        prompt=prompt,
        stream=stream == 1,
        include_usage=include_usage == 1,
        max_tokens=max_tokens if max_tokens >= 0 else None,
    )


def skim_request(path: str, body: Body, *, unread: str) -> InferenceRequest:
    """Read only which API and which model a body is for, without judging whether it is valid. `unread`: why
    the rest was not read.
    """
    weight = weigh(body)
    seen = _unread(path, body, weight, why=unread)
    if seen.model or weight.too_costly:
        return seen
    return msgspec.structs.replace(seen, model=_parse_other(body).model)  # `weigh` found no model


def _unread(path: str, body: Body, weight: Weight, *, why: str) -> InferenceRequest:
    model = _seen_model(weight.model)
    return InferenceRequest(kind=_api(path)[0], model=model, opaque=_is_media(body), unread=why)


def _api(path: str) -> tuple[ApiKind, Callable[[Body], InferenceRequest] | None]:
    known = _AT_PATH.get(path)
    if known is not None:
        return known
    plain = path.partition("?")[0].rstrip("/")
    return next(((kind, parse) for ending, kind, parse in _APIS if plain.endswith(ending)), _OTHER)


def _seen_model(value: bytes) -> str:
    """Return the model's name if `weigh` found it, so that an unread body goes to a server that has it."""
    try:
        return (name_in(Raw(value)) if value else None) or ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _parse_pathless(body: Body) -> InferenceRequest:
    try:
        present = DECODE_API_FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _parse_other(body)
    parse = _api_of_fields(present)
    if parse is None:
        return _parse_other(body)
    try:
        return _parse_known(parse, body)
    except BadRequestError:
        return _parse_other(body)


def _api_of_fields(present: ApiFields) -> Callable[[Body], InferenceRequest] | None:
    """Return the parser of the API that the fields show. If two APIs have these fields, return one whose
    canonical prompts are the same, so that prefixes are found for both.
    """
    if present.messages is not NO_RAW:
        return _parse_chat if present.system is NO_RAW else _parse_messages
    if present.prompt is not NO_RAW or present.prompt_embeds is not NO_RAW:
        return _parse_completions
    if present.input is not NO_RAW:
        text = bytes(memoryview(present.input)[:64])
        plain_items = text[:1] == b"[" and text[1:].lstrip()[:1] != b"{"
        embeds = plain_items or present.encoding_format is not NO_RAW or present.dimensions is not NO_RAW
        return _parse_embeddings if embeds else _parse_responses
    return _parse_responses if present.previous_response_id is not NO_RAW else None


def _parse_known(parse: Callable[[Body], InferenceRequest], body: Body) -> InferenceRequest:
    try:
        try:
            return parse(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            whole = bytes(body)
            repaired = replace_lone(whole)
            if repaired is whole:
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
        model = name_in(DECODE_OTHER.decode(body).model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        model = None  # Multipart forms, uploads and other JSON are routed by load.
    return InferenceRequest(kind=ApiKind.OTHER, model=model or "", opaque=_is_media(body))


def _is_media(body: Body) -> bool:
    """Return whether the body is a form or an upload, not JSON."""
    return bytes(body[:64]).lstrip()[:1] not in (b"{", b"[", b"")


def _parse_chat(body: Body) -> InferenceRequest:
    chat = DECODE_CHAT.decode(body)
    names = _names(chat)
    sections = canonical.raw_section(b"tools", chat.tools)
    render_messages(sections, chat.messages)
    limit, name = chat.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, name = chat.max_tokens, "max_tokens"
    return _request(
        ApiKind.CHAT,
        chat,
        names=names,
        prompts=Prompts(b"".join(sections)),
        max_tokens=_limit(limit, name=name),
        shaped=SHAPING_CHAT.sent(chat),
    )


def _parse_messages(body: Body) -> InferenceRequest:
    asked = DECODE_MESSAGES.decode(body)
    names = _names(asked)
    sections = canonical.raw_section(b"tools", asked.tools)
    if asked.system is not NO_RAW and asked.system != _NULL:
        sections += (canonical.heading(b"system"), content_bytes(asked.system, where="system"))
    render_messages(sections, asked.messages)
    max_tokens = _limit(asked.max_tokens, name="max_tokens")
    return _request(
        ApiKind.MESSAGES, asked, names=names, prompts=Prompts(b"".join(sections)), max_tokens=max_tokens
    )


def _parse_responses(body: Body) -> InferenceRequest:
    asked = DECODE_RESPONSES.decode(body)
    names = _names(asked)
    sections: list[Piece] = []
    previous = optional_text(asked.previous_response_id, where="previous_response_id")
    if previous:
        # The real prefix is only in the server's memory.
        # The id in front keeps these bytes from matching other prompts.
        sections += (canonical.label(b"previous"), canonical.OPAQUE, previous)
    sections += canonical.raw_section(b"tools", asked.tools)
    if asked.instructions is not NO_RAW and asked.instructions != _NULL:
        instructions = canonical.required_text(asked.instructions, where="instructions")
        sections += (canonical.heading(b"system"), instructions)
    if first_byte(asked.input) == _QUOTE:
        sections += (canonical.heading(b"user"), canonical.required_text(asked.input, where="input"))
    elif canonical.present(asked.input):
        items = canonical.items_of(asked.input, where="input", expected="must be a string or a list of items")
        for position, item in enumerate(items):
            sections += canonical.item_pieces(item, where=f"input[{position}]")
    elif not previous:
        raise BadRequestError(
            "`input` is missing or empty: send a string or a list of items.", reason="no_input"
        )
    max_tokens = _limit(asked.max_output_tokens, name="max_output_tokens")
    return _request(
        ApiKind.RESPONSES, asked, names=names, prompts=Prompts(b"".join(sections)), max_tokens=max_tokens
    )


def _parse_completions(body: Body) -> InferenceRequest:
    asked = DECODE_COMPLETIONS.decode(body)
    names = _names(asked)
    max_tokens = _limit(asked.max_tokens, name="max_tokens")
    prompts = _asked_prompts(asked.prompt, where="prompt")
    if prompts is None and not canonical.present(asked.prompt) and canonical.present(asked.prompt_embeds):
        embeds = canonical.label(b"embeds") + canonical.digest(asked.prompt_embeds)
        return _request(
            ApiKind.COMPLETIONS, asked, names=names, prompts=Prompts(embeds), max_tokens=max_tokens
        )
    return _request(
        ApiKind.COMPLETIONS,
        asked,
        names=names,
        prompts=_required(prompts, where="prompt"),
        max_tokens=max_tokens,
        shaped=SHAPING_COMPLETIONS.sent(asked),
    )


def _parse_embeddings(body: Body) -> InferenceRequest:
    asked = DECODE_EMBEDDINGS.decode(body)
    names = _names(asked)
    if asked.messages and asked.input in (NO_RAW, _NULL):
        sections: list[Piece] = []
        render_messages(sections, asked.messages)
        return _request(ApiKind.EMBEDDINGS, asked, names=names, prompts=Prompts(b"".join(sections)))
    prompts = _required(_asked_prompts(asked.input, where="input"), where="input")
    return _request(ApiKind.EMBEDDINGS, asked, names=names, prompts=prompts)


_APIS: tuple[tuple[str, ApiKind, Callable[[Body], InferenceRequest]], ...] = (
    ("/v1/chat/completions", ApiKind.CHAT, _parse_chat),
    ("/v1/completions", ApiKind.COMPLETIONS, _parse_completions),
    ("/v1/messages", ApiKind.MESSAGES, _parse_messages),
    ("/v1/responses", ApiKind.RESPONSES, _parse_responses),
    ("/v1/embeddings", ApiKind.EMBEDDINGS, _parse_embeddings),
)
_AT_PATH: Final = {path: (kind, parse) for path, kind, parse in _APIS}
"""The exact paths of nearly all requests."""
API_PATHS: Final = frozenset(_AT_PATH)
_OTHER: Final = (ApiKind.OTHER, None)


def _asked_prompts(raw: Raw, *, where: str) -> Prompts | None:
    """Return the prompts of the field `where`. None: the field has no prompt."""
    return None if raw is NO_RAW or raw == _NULL else read_prompts(raw, where=where)


def _required(prompts: Prompts | None, *, where: str) -> Prompts:
    if prompts is None:
        what = "send a string, a list of strings, or token ids"
        raise BadRequestError(f"`{where}` is missing or empty: {what}.", reason=f"no_{where}")
    return prompts


def _request(
    kind: ApiKind,
    body: AnyBody,
    *,
    names: _Names,
    prompts: Prompts,
    max_tokens: int | None = None,
    shaped: bool = False,
) -> InferenceRequest:
    options = body.stream_options
    return InferenceRequest(
        kind=kind,
        model=names.model,
        prompt=prompts.first,
        more_prompt_bytes=prompts.more_bytes,
        token_ids=prompts.token_ids,
        opaque=not prompts.token_ids and canonical.OPAQUE in prompts.first,
        cache_salt=names.cache_salt,
        stream=body.stream is True,
        include_usage=options is not None and options.include_usage is True,
        max_tokens=max_tokens,
        shaped=shaped,
        priority=priority_in(body.priority),
    )


class _Names(Struct, frozen=True, gc=False):
    model: str
    cache_salt: str


def _names(body: AnyBody) -> _Names:
    """Return the names that distinguish requests, each of bounded length."""
    model, salt = name_in(body.model), ""
    if not model:
        raise _no_model()
    if body.cache_salt is not NO_RAW and body.cache_salt != _NULL:
        named = name_in(body.cache_salt)
        if named is None:
            raise bad_field("cache_salt", "must be a string")
        salt = named
    return _Names(model, salt)


def _no_model() -> BadRequestError:
    return BadRequestError(
        "`model` is missing: name the model or adapter to use, as a string.", reason="no_model"
    )


def _limit(value: int | None, *, name: str) -> int | None:
    if value is not None and value < 0:
        raise bad_field(name, "must not be negative")
    return value


_AT = " - at `$."


def _explained(fault: str) -> BadRequestError:
    """Return the decoder's error in the user's words, of the form ``Expected `str`, got `int` - at
    `$.model```.
    """
    what, at, field = fault.partition(_AT)
    if not at:
        return BadRequestError("The body must be a JSON object.", reason="bad_json")
    field = field.rstrip("`")
    if field == "model":
        return _no_model()
    return bad_field(field, f"is not as it should be: {what[:1].lower()}{what[1:]}")
