"""Further front ends of the same engine: `/v1/messages` and `/v1/embeddings`.

Each body becomes the body of a chat or a completion, which the request reader reads and bounds. Each answer
has its API's own shape, whole or streamed. Fields that change an answer and are not done are refused. Tools
reach the chat template, and only a forced call is one in the answer. Embeddings are made up from a hash of
the prompt. This module does no I/O. Caller: the routes.
"""

import base64
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from model_server.core.request import FinishReason, Request
from model_server.server.errors import ApiError
from model_server.server.openai import read_body
from model_server.server.prompts import ABSENT, given, option
from model_server.server.refused import check
from model_server.server.replies import Delta, Reply

_MOST_DIMENSIONS = 1024
_DEFAULT_DIMENSIONS = 384

OWN_FORM_FIELD = {"/v1/messages": "output_config.format", "/v1/responses": "text.format"}
"""What `response_format` is called at these paths."""
_PASSED = (
    "model", "stream", "cache_salt", "chat_template_kwargs", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "structured_outputs",
)  # fmt: skip
"""Fields that go into the body of the chat as they are."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {"return_mm_kwargs": (False,), "watermarking": (False,)}
NEUTRAL_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "container": (),
    "mcp_servers": ([],),
}
NEUTRAL_IN_EMBEDDINGS: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "truncation_side": ("left",),
    "use_activation": (True,),
}


def raw_fields(
    neutral: Mapping[str, tuple[object, ...]], more: Sequence[str] = _PASSED
) -> type[msgspec.Struct]:
    """Return a body with these fields and with `more`, which are those that `passed` reads."""
    return msgspec.defstruct("_Raws", [(n, msgspec.Raw, ABSENT) for n in (*more, *neutral)], kw_only=True)


def passed(body: msgspec.Struct) -> bytes:
    return b"".join(b'"%b":%b,' % (n.encode(), bytes(raw)) for n in _PASSED if given(raw := getattr(body, n)))


class MessagesBody(raw_fields(NEUTRAL_IN_MESSAGES), kw_only=True):  # type: ignore[misc, call-arg]  # from the list
    messages: msgspec.Raw
    max_tokens: int = 0
    """0 if none is named, as when tokens are counted. No answer can have it."""
    system: msgspec.Raw = ABSENT
    stop_sequences: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT


class _MessagesChoice(msgspec.Struct):
    type: Literal["auto", "none", "any", "tool"]
    name: str = ""


class _Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class FormatConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer: `output_config` of a message, `text` of a response."""

    format: _Format | None = None


class _MessagesTool(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = msgspec.field(default_factory=dict)


class EmbeddingsBody(raw_fields(NEUTRAL_IN_EMBEDDINGS, ()), kw_only=True):  # type: ignore[misc, call-arg]  # from the list
    input: msgspec.Raw
    model: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=_MOST_DIMENSIONS)] | None = None


def chat_of_messages(raw: bytes) -> bytes:
    """Return the chat body. The messages stay raw JSON, which the request reader measures before it decodes
    them.
    """
    body = read_body(raw, MessagesBody)
    check(body, NEUTRAL_IN_MESSAGES)
    messages = bytes(body.messages).lstrip()
    if not messages.startswith(b"["):
        raise ApiError("messages must be a list.", param="messages")
    if given(body.system):
        messages = b'[{"role":"system","content":%b},%b' % (bytes(body.system), messages[1:])
    tools: list[_MessagesTool] | None = option(body.tools, list[_MessagesTool], param="tools")
    choice: _MessagesChoice | None = option(body.tool_choice, _MessagesChoice, param="tool_choice")
    config: FormatConfig | None = option(body.output_config, FormatConfig, param="output_config")
    rest: dict[str, object] = {
        "max_tokens": body.max_tokens,
        "tool_choice": _chat_choice(choice),
        "response_format": chat_format(config),
        "tools": [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in tools or ()
        ],
    }
    if given(body.stop_sequences):
        if given(body.stop):
            raise ApiError("Give either stop or stop_sequences.", param="stop")
        rest["stop"] = option(body.stop_sequences, list[str], param="stop_sequences")
    return b'{%b"messages":%b,%b' % (passed(body), messages, msgspec.json.encode(rest)[1:])


def _chat_choice(choice: _MessagesChoice | None) -> object:
    if choice is not None and choice.type == "tool":
        return {"function": {"name": choice.name}}
    return "required" if choice is not None and choice.type == "any" else None


def chat_format(config: FormatConfig | None) -> object:
    """Return the chat's `response_format`."""
    if config is None or config.format is None:
        return None
    return {"type": config.format.type, "json_schema": {"schema": config.format.schema}}


def completion_of_embeddings(body: EmbeddingsBody) -> bytes:
    check(body, NEUTRAL_IN_EMBEDDINGS)
    rest = {name: getattr(body, name) for name in ("model", "cache_salt", "truncate_prompt_tokens")}
    rest |= {"max_tokens": 1, "ignore_eos": True}
    return b'{"prompt":%b,%b' % (bytes(body.input), msgspec.json.encode(rest)[1:])


class MessagesReply(Reply):
    """An answer in the shape of Anthropic's API."""

    _last: Delta | None = None

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        [delta], [request] = deltas, requests
        call = self.call(delta)
        content = {"text": delta.text} if call is None else {"input": msgspec.json.decode(call[1])}
        message = self._message([{**self._block(call), **content}], _tokens(request))
        return {**message, **self._stopped(delta)}

    def begin(self, requests: Sequence[Request]) -> list[bytes]:
        counted = {**_tokens(requests[0]), "output_tokens": 0}
        return [named_event("message_start", {"message": self._message([], counted)})]

    def event(self, delta: Delta, *, request: Request | None = None) -> bytes:
        del request
        call, first, self._last = self.call(delta), self._last is None, delta
        opened = {"index": 0, "content_block": self._block(call)}
        begun = named_event("content_block_start", opened) if first else b""
        part = {"type": "text_delta", "text": delta.text}
        if call is not None:
            part = {"type": "input_json_delta", "partial_json": call[1]}
        return begun + named_event("content_block_delta", {"index": 0, "delta": part})

    def end(self, requests: Sequence[Request]) -> list[bytes]:
        assert self._last is not None, "an answer has an end"
        ended = {"delta": self._stopped(self._last), "usage": _tokens(requests[0])}
        return [
            named_event("content_block_stop", {"index": 0}),
            named_event("message_delta", ended),
            named_event("message_stop", {}),
        ]

    def _block(self, call: tuple[str, str] | None) -> dict[str, Any]:
        if call is None:
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": f"toolu_{self.reply_id}", "name": call[0], "input": {}}

    def _stopped(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        if self.call(delta) is not None:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        cut_short = delta.finish_reason is FinishReason.LENGTH
        return {"stop_reason": "max_tokens" if cut_short else "end_turn", "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], counted: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.reply_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counted,
        }


class EmbeddingsReply(Reply):
    """A made-up vector of length 1 for each prompt. Equal prompts have equal vectors."""

    def __init__(self, *, body: EmbeddingsBody, **head: Any) -> None:
        super().__init__(**head)
        self._body = body

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        del deltas
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(request)}
            for index, request in enumerate(requests)
        ]
        tokens = sum(request.num_prompt_tokens for request in requests)
        counted = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": counted}

    def _vector(self, request: Request) -> list[float] | str:
        rng = random.Random(request.fingerprint)
        numbers = [rng.gauss() for _ in range(self._body.dimensions or _DEFAULT_DIMENSIONS)]
        length = sum(number * number for number in numbers) ** 0.5
        vector = [number / length for number in numbers]
        if self._body.encoding_format == "base64":
            return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        return vector


def _tokens(request: Request) -> dict[str, int]:
    cached = request.num_cached_tokens or 0
    return {
        "input_tokens": request.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": request.num_output_tokens,
    }


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
