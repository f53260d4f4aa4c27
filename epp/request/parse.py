"""Reads a request body once: its API, its model, the canonical prompt, and the few fields that routing uses.

The server decides which requests are valid. So what is not understood here is sent on and routed by load,
with the reason `NOT_UNDERSTOOD`. Only a body that no server of a known API can read, because it is no JSON
object, is refused. The body itself is sent on unchanged, so the result decides only the route. For any bytes,
this module raises no other error than BadRequestError.

Every body is first weighed (`jsontext`). A body that would take too long is returned unread, with the reason.
All other bodies are decoded field by field. A field that is not part of the prompt stays the bytes that were
sent.

Called by the ext_proc state machine for each request; pure and synchronous.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind, InferenceRequest, Media
from epp.request import api_fields, canonical
from epp.request._jsontext import plain_messages
from epp.request.api_fields import Fields
from epp.request.canonical import PART, PromptPiece, Prompts, UnfollowedError, present
from epp.request.client_names import MAX_NAME_CHARS, bounded_name, is_form, model_in_form
from epp.request.jsontext import (
    MOST_BYTES,
    MOST_UNITS,
    NO_RAW,
    SMALL_BYTES,
    first_byte,
    places_of,
    text_bytes,
    too_costly,
)
from epp.request.media import MOST_TOKENS, SOUND_BYTES, UNKNOWN_TOKENS

COSTLY: Final = "costly_body"
"""Why a body was not read: reading it would delay all other requests."""
NOT_UNDERSTOOD: Final = "not_understood"
"""Why a body was not read: it does not have the shape of its API, as far as is known here."""

_QUOTE = ord('"')
_BOM = b"\xef\xbb\xbf"

_BRACE = ord("{")
_MESSAGES_KEY: Final = re.compile(rb'"messages"[ \n\r\t]*:').search
_SEARCHED_BYTES: Final = 262_144
"""The messages are looked for in so many bytes."""
_MARKED_ROLE: Final = b"0"
_MARK: Final = b'[{"role":0}]'
"""Messages that no server takes."""
_MOST_NAME_BYTES: Final = 12 * MAX_NAME_CHARS + 2
"""Longest JSON of a name that is kept: each letter may be two escapes."""
_DECODE_NAME: Final = msgspec.json.Decoder(str)

_READ_BY_PYTHON: Final = (b"NaN", b"Infinity", b"\0", b"\\ud", b"\\uD")
"""Only JSON with one of these may be read by Python's decoder and not by ours: UTF-16 has zeros, and half of
a surrogate pair has no UTF-8."""

_UNREADABLE: Final = (
    msgspec.DecodeError, OverflowError, UnicodeDecodeError, RecursionError, UnfollowedError,
)  # fmt: skip

_TOOLS: Final = canonical.label(b"tools")
_EMBEDDING_CHARS: Final = 10_923
"""Base64 of one token's embedding of 4,096 numbers of two bytes."""
_NO_MEDIA: Final = Media()
_NO_FIELDS: Final = (NO_RAW,) * 7
"""The fields of `BESIDE_PROMPT`, if none came."""

_NAMING: Final = {
    ApiKind.RESPONSES: ("previous_response_id", "conversation"),
    ApiKind.QUERY: ("previous_response_id", "conversation", "input_file_id"),
}
"""The fields that name what one server keeps."""

BodyBytes = bytes | memoryview
"""The body of a request as it came."""
_Parse = Callable[[Fields], InferenceRequest]


def parse_request(path: str, body: BodyBytes) -> InferenceRequest:
    """Read a body sent to `path`. The end of the path names the API, so a gateway's prefix and a query string
    do no harm.

    Without a path the body's fields show the API. Raises BadRequestError if the path is one of a known API
    and the body is no JSON object.
    """
    if not body:
        return InferenceRequest(kind=ApiKind.OTHER)
    if body[: len(_BOM)] == _BOM:
        body = body[len(_BOM) :]
    parse = _api(path)[1]
    if parse is None and path:
        return skim_request(path, body)
    if parse is _parse_chat and (plain := plain_chat(body)) is not None:
        return plain
    if too_costly(body):
        return skim_request(path, body, unread=COSTLY)
    try:
        fields = api_fields.DECODE(body)
        parse = parse or _api_of_fields(fields)
        return skim_request(path, body) if parse is None else parse(fields)
    except _UNREADABLE as error:
        if path:
            _refuse_unreadable(body, error)
        return skim_request(path, body, unread=NOT_UNDERSTOOD if path else "")


def plain_chat(body: BodyBytes) -> InferenceRequest | None:
    """Read a chat whose messages hold only texts, as nearly all chats do: the messages in one pass, and all
    other fields by the decoder, which has to find the mark in the place of the messages.

    None: the messages are of another kind, the body is too costly, or it has an error to be judged.
    """
    key = _MESSAGES_KEY(body, 0, _SEARCHED_BYTES) if len(body) <= MOST_BYTES else None
    if key is None:
        return None
    view, at = memoryview(body), key.end()
    prompt, size = plain_messages(view[at:], MOST_UNITS)
    if prompt is None:
        return None
    rest = b"".join((view[:at], _MARK, view[at + size :]))
    if len(rest) > SMALL_BYTES and too_costly(rest):
        return None
    try:
        fields = api_fields.DECODE(rest)
        if not fields.messages or bytes(fields.messages[0].role) != _MARKED_ROLE:
            return None
        fields.messages = None
        return _parse_chat(fields, prompt)
    except _UNREADABLE:
        return None


def skim_request(path: str, body: BodyBytes, *, unread: str = "") -> InferenceRequest:
    """Read only which API, which model and what kept state a body is for, without judging whether it is
    valid. `unread`: why the rest was not read. Uploads and the JSON of other APIs have nothing else to read.
    """
    kind = _api(path)[0]
    if bytes(body[:64]).lstrip()[:1] not in (b"{", b"[", b""):
        # It is no JSON, but a form or an upload, which most often is a recording.
        tokens = min(MOST_TOKENS, 1 + len(body) // SOUND_BYTES)
        place = model_in_form(body) if is_form(body) else None
        model = bounded_name(bytes(body[slice(*place)]).decode("utf-8", "replace")) if place else ""
        return InferenceRequest(kind=kind, model=model, media=Media(sound=tokens), unread=unread)
    model = named = ""
    with suppress(*_UNREADABLE):
        model_json, *ids = [Raw(body[at]) for at in places_of(body, "model", *_NAMING.get(kind, ()))]
        model, named = name_in(model_json) or "", id_in_body(*ids)
    return InferenceRequest(kind=kind, model=model, names_state=named, unread=unread)


def _api(path: str) -> tuple[ApiKind, _Parse | None]:
    known = _AT_PATH.get(path)
    if known is not None:
        return known
    plain = path.partition("?")[0].rstrip("/")
    return next(((kind, parse) for ending, kind, parse in _APIS if plain.endswith(ending)), _OTHER)


def _api_of_fields(fields: Fields) -> _Parse | None:
    """Return the parser of the API that the fields show. If two APIs have these fields, return one whose
    canonical prompts are the same, so that prefixes are found for both.
    """
    if fields.messages is not None:
        return _parse_chat if fields.system is NO_RAW else _parse_messages
    if fields.prompt is not NO_RAW or fields.prompt_embeds is not NO_RAW:
        return _parse_completions
    if fields.input is not NO_RAW:
        text = bytes(memoryview(fields.input)[:64])
        plain_items = text[:1] == b"[" and text[1:].lstrip()[:1] != b"{"
        embeds = plain_items or fields.encoding_format is not NO_RAW or fields.dimensions is not NO_RAW
        return _parse_embeddings if embeds else _parse_responses
    return _parse_responses if fields.previous_response_id is not NO_RAW else None


def _refuse_unreadable(body: BodyBytes, error: Exception) -> None:
    """Raise BadRequestError if no server can read this body, which is sent to a known API."""
    wrong = ""
    match error:
        case msgspec.ValidationError() | OverflowError() | UnfollowedError():
            if bytes(body).lstrip()[:1] != b"{":
                wrong = "The body must be a JSON object."
        case msgspec.DecodeError():
            if not any(word in bytes(body) for word in _READ_BY_PYTHON):
                wrong = f"The body is not valid JSON: {error}."
        case UnicodeDecodeError():
            wrong = "The body is not valid UTF-8; send JSON in UTF-8."
        case RecursionError():
            wrong = "The body's JSON is nested too deeply."
    if wrong:
        raise BadRequestError(wrong, reason="bad_json") from error


def name_in(value: Raw) -> str | None:
    """Return a JSON string as a name. None: it is not a string. A long name is not decoded. Raises
    DecodeError if the string is malformed.
    """
    json = memoryview(value)
    if not json or json[0] != _QUOTE:
        return None
    if len(json) <= _MOST_NAME_BYTES:
        name = _DECODE_NAME.decode(value)
        return name if len(name) <= MAX_NAME_CHARS else bounded_name(name)
    start = bytes(json[1:MAX_NAME_CHARS]).decode("ascii", "replace")
    return bounded_name(start + blake2b(json, digest_size=16).hexdigest())


def id_in_body(*values: Raw) -> str:
    """Return the first id in these fields of a body: a text, or an object with an `id`. Empty: there is none.
    Raises DecodeError if a field is malformed.
    """
    for value in values:
        if name := name_in(value):
            return name
        if first_byte(value) == _BRACE and (name := name_in(api_fields.DECODE_NAMED(value).id)):
            return name
    return ""


def _parse_chat(fields: Fields, prompt: bytes = b"") -> InferenceRequest:
    """prompt: the messages, if they were read before."""
    messages: list[PromptPiece] = [prompt]
    media: list[Media] = []
    if fields.messages:
        canonical.render_messages(messages, fields.messages, media=media, thinks=False)
    sections, shaped = messages, False
    if (beside := api_fields.BESIDE_PROMPT(fields)) != _NO_FIELDS:
        shaped = any(map(present, beside[1:]))
        sections = []
        if present(fields.chat_template):
            sections += (canonical.label(b"template"), canonical.digest(fields.chat_template))
        sections += canonical.as_sent(canonical.label(b"documents"), fields.documents)
        sections += canonical.as_sent(_TOOLS, fields.tools)
        sections += messages
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    return _request(ApiKind.CHAT, fields, sections, media, max_tokens=limit, shaped=shaped)


def _parse_messages(fields: Fields) -> InferenceRequest:
    media: list[Media] = []
    sections = canonical.as_sent(_TOOLS, fields.tools)
    if system := PART.join(canonical.content_parts(fields.system, media=media, system=True)):
        sections += (canonical.heading(b"system"), system)
    canonical.render_messages(sections, fields.messages, media=media, thinks=True)
    return _request(ApiKind.MESSAGES, fields, sections, media, max_tokens=fields.max_tokens)


def _parse_responses(fields: Fields) -> InferenceRequest:
    sections: list[PromptPiece] = []
    media: list[Media] = []
    if previous := text_bytes(fields.previous_response_id):
        media.append(Media(others=UNKNOWN_TOKENS))
        # The real prefix is only in the server's memory.
        # The id in front keeps these bytes from matching other prompts.
        sections += (canonical.label(b"previous"), canonical.OPAQUE, previous)
    sections += canonical.as_sent(_TOOLS, fields.tools)
    if instructions := text_bytes(fields.instructions):
        sections += (canonical.heading(b"system"), instructions)
    if first_byte(fields.input) == _QUOTE:
        sections += (canonical.heading(b"user"), text_bytes(fields.input) or b"")
    else:
        canonical.render_items(sections, fields.input, media=media)
    return msgspec.structs.replace(
        _request(ApiKind.RESPONSES, fields, sections, media, max_tokens=fields.max_output_tokens),
        names_state=id_in_body(fields.previous_response_id, fields.conversation),
        stores=fields.store is not False,
    )


def _parse_completions(fields: Fields) -> InferenceRequest:
    prompts, embeds = canonical.read_prompts(fields.prompt), list[Media]()
    if not present(fields.prompt) and present(fields.prompt_embeds):
        prompts = Prompts(canonical.label(b"embeds") + canonical.digest(fields.prompt_embeds))
        embeds.append(Media(others=1 + len(memoryview(fields.prompt_embeds)) // _EMBEDDING_CHARS))
    shaped = any(map(present, api_fields.BESIDE_PROMPT(fields)[-2:]))
    return _request(ApiKind.COMPLETIONS, fields, prompts, embeds, max_tokens=fields.max_tokens, shaped=shaped)


def _parse_embeddings(fields: Fields) -> InferenceRequest:
    if present(fields.input):
        return _request(ApiKind.EMBEDDINGS, fields, canonical.read_prompts(fields.input))
    sections: list[PromptPiece] = []
    media: list[Media] = []
    canonical.render_messages(sections, fields.messages, media=media, thinks=False)
    return _request(ApiKind.EMBEDDINGS, fields, sections, media)


def _parse_generate(fields: Fields) -> InferenceRequest:
    prompts = (fields.prompt, fields.text, fields.inputs, fields.input_ids, fields.token_ids)
    return _request(ApiKind.OTHER, fields, canonical.read_prompts(next(filter(present, prompts), NO_RAW)))


_APIS: tuple[tuple[str, ApiKind, _Parse | None], ...] = (
    ("/v1/chat/completions", ApiKind.CHAT, _parse_chat),
    ("/v1/completions", ApiKind.COMPLETIONS, _parse_completions),
    ("/v1/messages", ApiKind.MESSAGES, _parse_messages),
    ("/v1/responses", ApiKind.RESPONSES, _parse_responses),
    ("/v1/responses/compact", ApiKind.RESPONSES, _parse_responses),
    ("/v1/embeddings", ApiKind.EMBEDDINGS, _parse_embeddings),
    ("/generate", ApiKind.OTHER, _parse_generate),
    ("/generate_stream", ApiKind.OTHER, _parse_generate),
    *(
        (f"/{name}", ApiKind.QUERY, None)
        for name in (
            "count_tokens", "input_tokens", "tokenize", "detokenize", "render", "derender", "cancel", "files", "batches", "conversations",
        )
    ),
)  # fmt: skip
_AT_PATH: Final = {path: (kind, parse) for path, kind, parse in _APIS}
"""The exact paths of nearly all requests."""
API_PATHS: Final = frozenset(_AT_PATH)
_OTHER: Final = (ApiKind.OTHER, None)


def _request(
    kind: ApiKind,
    fields: Fields,
    prompts: Prompts | list[PromptPiece],
    media: Sequence[Media] = (),
    *,
    max_tokens: int | None = None,
    shaped: bool = False,
) -> InferenceRequest:
    """Return the request of a body. prompts: or the pieces of its only prompt. media: the guessed tokens of
    each hash in it.
    """
    if isinstance(prompts, list):
        prompts = Prompts(b"".join(prompts))
    given = fields.cache_salt is not NO_RAW and present(fields.cache_salt)
    salt = name_in(fields.cache_salt) if given else ""
    if salt is None:
        raise UnfollowedError
    return InferenceRequest(
        kind=kind,
        model=name_in(fields.model) or "",
        prompt=prompts.first,
        more_prompt_bytes=prompts.more_bytes,
        token_ids=prompts.token_ids,
        media=_together(media) if media else _NO_MEDIA,
        cache_salt=salt,
        stream=fields.stream is True,
        max_tokens=None if max_tokens is not None and max_tokens < 0 else max_tokens,
        shaped=shaped,
    )


def _together(media: Sequence[Media]) -> Media:
    """Return the guesses of all parts, at most `MOST_TOKENS` in all."""
    together = Media(*map(sum, zip(*media, strict=True)))
    most = max(MOST_TOKENS, sum(together))
    return Media(*[tokens * MOST_TOKENS // most for tokens in together])
