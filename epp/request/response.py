"""Reads the answer to a sampled request while it streams through the picker: the time of the first token and
the reported usage.

It understands server-sent events and plain JSON of each API, skips others and compressed bodies, and reads
the beginning of gzip for the id of what the server made. Nothing that a server sends makes it raise an error.
Its memory is bounded by MAX_EVENT_BYTES of one event. The same bytes give the same feedback in whatever
pieces they come, but for the time, that of the piece that completed the first event with generated text.

An `EventSplitter` cuts the stream into events. Lines end in LF or CRLF, as all servers write them. A longer
event is dropped whole. After `MOST_LINES` of one answer nothing more is read: each line costs half a
microsecond, however short it is.

Called by the ext_proc state machine for the sampled share of requests.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from epp.base.types import ApiKind
from epp.request.client_names import bounded_name
from epp.request.jsontext import units_of

_BOM: Final = b"\xef\xbb\xbf"
_END: Final = re.compile(rb"\r?\n\r?\n")
_LONGEST_END: Final = 4
_DATA: Final = re.compile(rb"(?m)^data: ?(.*)$")
MOST_LINES: Final = 200_000
MAX_EVENT_BYTES = 1 << 20
"""Bound of one event, or of a whole answer in plain JSON. A larger one is skipped."""


class EventSplitter:
    def __init__(self) -> None:
        self._held = bytearray()
        """The event that has not ended."""
        self._skips = False
        """The current event passed the limit, so nothing of it is kept."""
        self._lines = 0
        self.dropped = False
        """Whether an event was dropped."""

    def feed(self, piece: bytes | memoryview) -> list[bytes]:
        held, events = self._held, []
        start, at = max(0, len(held) - _LONGEST_END + 1), 0
        held += piece
        while self._lines <= MOST_LINES and (end := _END.search(held, start)):
            events += self._event(bytes(held[at : end.start()]))
            start = at = end.end()
        del held[:at]
        if self._lines > MOST_LINES:
            held.clear()
        elif len(held) >= MAX_EVENT_BYTES + _LONGEST_END:
            self._skips = self.dropped = True
            del held[: 1 - _LONGEST_END]
        return events

    def finish(self) -> list[bytes]:
        """Return the event that the stream ended in, if any: some servers leave out the last blank line."""
        return self._event(bytes(self._held).rstrip(b"\r\n"))

    def _event(self, text: bytes) -> list[bytes]:
        """Return the data of an event, if it has any and may be read."""
        skips, self._skips = self._skips, False
        if self._lines == 0:
            text = text.removeprefix(_BOM)
        self._lines += text.count(b"\n") + 2  # with the blank line
        if skips or len(text) > MAX_EVENT_BYTES or self._lines > MOST_LINES:
            self.dropped = True
            return []
        data = b"\n".join(_DATA.findall(text.replace(b"\r\n", b"\n")))
        return [data] if data else []


_MOST_UNITS = 20_000
"""Bound of the strings, lists, objects and commas in one event or answer. One with more would take too long
and is skipped."""

_MOST_COUNT = 2**36
"""The largest number of tokens that an answer may state. A larger number is ignored. Sums of these numbers
become floats."""

_FRONT: Final = re.compile(rb'\s*\{(?:[^{}]{0,99}"response"\s*:\s*\{)?\s*"id"\s*:\s*"([^"\\]{1,999})"')
"""The id in front of an answer, or of the response in an event."""
_UNPACKED_BYTES: Final = 65_536
"""What is read of a compressed answer."""
NO_CONTENT: Final = 204
"""The status of an answer that says why it ends, and has no token."""
PARTIAL: Final = 206
"""The status of an answer without its own end, or of broken JSON."""
_DECODER = msgspec.json.Decoder(float_hook=bool)
"""Floats stay undecoded: they are not used, and some take microseconds to decode."""


@dataclass(frozen=True, slots=True)
class ResponseFeedback:
    """What a sampled answer showed. None: it did not show this value."""

    first_token_at: float | None = None
    """When the first generated text came, including reasoning and tool calls. None for plain JSON, which
    comes all at once."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    status: int | None = None
    """The status that the body shows: 200 if something was generated and the answer's own end came, the code
    of an error, `NO_CONTENT`, or `PARTIAL` if the server ended the answer otherwise."""
    made: str = ""
    """The id of what the server made, if only the end showed it. See `ResponseReader.feed`."""


class ResponseReader:
    def __init__(self, *, kind: ApiKind, content_type: str, content_encoding: str) -> None:
        media_type = content_type.partition(";")[0].strip().lower()
        encoding, makes = content_encoding.strip().lower(), kind in (ApiKind.RESPONSES, ApiKind.QUERY)
        plain = (encoding in ("", "identity") and kind is not ApiKind.OTHER) or (encoding == "gzip" and makes)
        is_json = media_type == "application/json" or media_type.endswith("+json")
        events = EventSplitter()
        self._kind = kind
        # Whatever is not JSON is read as events. A page of HTML has none, so it is an answer without a token.
        self._events = events if plain and not is_json and kind is not ApiKind.EMBEDDINGS else None
        self._json = bytearray() if plain and is_json else None
        self._packed = zlib.decompressobj(wbits=31) if plain and encoding == "gzip" else None
        self._room = _UNPACKED_BYTES
        self._generated = False
        self._finished = False
        """Whether the answer says why it ends, though perhaps without a token."""
        self._complete = False
        """Whether the answer's own end came."""
        self._error: int | None = None
        self._first_token_at: float | None = None
        self._usage: dict[str, int] = {}
        """The last count that came under each name."""
        self._seeks_id = makes
        self._made = ""
        """The id of what the server made, until it is returned."""

    def feed(self, piece: bytes | memoryview, *, now: float) -> str:
        """Read a piece. Return the id of the object that the server made and keeps, such as a stored
        response, if this piece shows the id: a client may name it while the answer goes on.
        """
        piece = self._unpacked(piece)
        if self._events is not None:
            for data in self._events.feed(piece):
                self._on_event(data)
            if self._generated and self._first_token_at is None:
                self._first_token_at = now
        elif self._json is not None:
            self._json += piece
            if len(self._json) > MAX_EVENT_BYTES:
                self._note_id({}, self._json)
                self._json = None
        made, self._made = self._made, ""
        return made

    def _unpacked(self, piece: bytes | memoryview) -> bytes | memoryview:
        if self._packed is None:
            return piece
        if self._packed.eof or not self._room:  # what follows the end of the data would be kept
            return b""
        try:
            text = self._packed.decompress(piece, self._room)
        except zlib.error:
            text = b""
        self._room -= len(text)
        return text

    def finish(self, *, whole: bool = True) -> ResponseFeedback:
        """Return the result. Call this once, when the answer has ended or was cut off. whole: the server
        ended it. Otherwise the client may have left, so what is missing shows nothing.
        """
        if self._events is not None:
            for data in self._events.finish():
                self._on_event(data)
        elif self._json is not None:
            self._on_json(bytes(self._json))
        if self._packed is not None:
            return ResponseFeedback(made=self._made)
        counts = self._usage.get
        prompt_tokens = counts("prompt_tokens", counts("input_tokens"))
        cached_tokens = counts("cached_tokens")
        if self._kind is ApiKind.MESSAGES:
            # Anthropic counts tokens read from the cache, tokens written to it, and all others.
            prompt_tokens, cached_tokens = counts("input_tokens"), counts("cache_read_input_tokens")
            if prompt_tokens is not None:
                prompt_tokens += (cached_tokens or 0) + counts("cache_creation_input_tokens", 0)
        completion_tokens = counts("completion_tokens", counts("output_tokens"))
        # Some tokens have no text. A token that only ends the answer may count as one.
        self._generated = self._generated or (completion_tokens or 0) > 1
        return ResponseFeedback(
            first_token_at=self._first_token_at,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            status=self._status(whole=whole),
            made=self._made,
        )

    def _status(self, *, whole: bool) -> int | None:
        unread = self._events.dropped if self._events is not None else self._json is None
        if self._error is not None or not whole or unread or self._kind is ApiKind.QUERY:
            return self._error or (200 if self._generated else None)
        if self._generated:
            return 200 if self._finished or self._complete else PARTIAL
        return NO_CONTENT if self._finished else PARTIAL

    # Events

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._complete = True
            return
        event = self._decoded(data)
        self._error = _error_code(event) or self._error
        for holder in (event, _object(event.get("response")), _object(event.get("message"))):
            self._on_usage(holder)
        for choice in _objects(event.get("choices")):
            delta = _object(choice.get("delta")) or choice
            self._generated = self._generated or any(delta.get(key) for key in _GENERATED_KEYS)
            self._finished = self._finished or bool(choice.get("finish_reason"))
        self._note_id(_object(event.get("response")), b"" if event else data)
        kind, change = str(event.get("type")), event.get("delta")
        if kind.endswith(".delta") and change:
            self._generated = True
        elif kind == "content_block_delta":
            self._generated = self._generated or any(_object(change).get(key) for key in _BLOCK_KEYS)
        self._finished = self._finished or kind in _REASONS
        self._complete = self._complete or kind in _ENDS

    # Plain JSON

    def _on_json(self, body: bytes) -> None:
        answer = self._decoded(body)
        self._error = _error_code(answer)
        if self._error:
            return
        self._note_id(answer, body)
        if answer.get("status") in _UNDONE:
            self._json = None  # a response that is made in the background: this shows nothing
            return
        self._finished = self._finished or bool(answer.keys() & _RESULT_KEYS)
        choices = _objects(answer.get("choices"))
        parts = [_object(choice.get("message")) or choice for choice in choices] or [answer]
        held = any(part.get(key) for part in parts for key in (*_GENERATED_KEYS, *_RESULT_KEYS))
        self._generated = self._generated or held
        self._on_usage(answer)

    def _decoded(self, data: bytes) -> dict[str, object]:
        """Return a JSON object, else empty. One that is too large to be read is taken for a good answer."""
        if units_of(data) > _MOST_UNITS:
            self._finished = self._generated = True
            return {}
        try:
            return _object(_DECODER.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}

    def _note_id(self, made: dict[str, object], text: bytes | bytearray) -> None:
        """Note the id of the object that the server made. A text too large to decode has it in front."""
        if self._seeks_id:
            front = None if made else _FRONT.match(text)
            name = front[1].decode(errors="replace") if front else made.get("id")
            self._made = bounded_name(name) if isinstance(name, str) else ""
            self._seeks_id = not self._made

    def _on_usage(self, holder: dict[str, object]) -> None:
        usage = _object(holder.get("usage"))
        details = _object(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
        for name, value in (*usage.items(), ("cached_tokens", details.get("cached_tokens"))):
            counts = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNT
            if name in _COUNTS and counts:
                self._usage[name] = cast("int", value)


_COUNTS = frozenset(
    (
        "prompt_tokens",
        "input_tokens",
        "cached_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "completion_tokens",
        "output_tokens",
    )
)
_GENERATED_KEYS = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "refusal",
    "function_call",
    "text",
    "audio",
    "token_ids",
)
_BLOCK_KEYS = ("text", "thinking", "partial_json")
_REASONS = ("response.completed", "response.incomplete", "message_delta")
"""Events that say why the answer ends."""
_ENDS = ("response.completed", "response.incomplete", "message_stop")
_UNDONE = ("queued", "in_progress")
_RESULT_KEYS = frozenset(("choices", "output", "content", "data"))


def _error_code(event: dict[str, object]) -> int | None:
    """Return the status of an error that stands in an event or answer, in the form of any API. 500: it has
    no status. None: there is no error.
    """
    response = _object(event.get("response"))
    is_error = "error" in (event.get("object"), event.get("type")) or response.get("status") == "failed"
    error = _object(event.get("error") or response.get("error")) or (event if is_error else {})
    if not (error or event.get("error")):
        return None
    code, kind = error.get("code"), str(error.get("type")).lower()
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return 400 if "invalid_request" in kind or "badrequest" in kind else 500


def _object(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
