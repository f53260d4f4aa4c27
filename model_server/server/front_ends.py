"""Further front ends of the same engine: `/v1/messages`, `/v1/responses` and `/v1/embeddings`.

Each body becomes the body of a chat or a completion, which the request reader reads and bounds. Each answer
has its API's own shape, whole or streamed. Fields that change an answer and are not done are refused. Tools
reach the chat template, and only a forced call is one in the answer. Embeddings are made up from a hash of
the prompt. This module does no I/O. Caller: the routes.
"""

from __future__ import annotations

import base64
import random
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from model_server.core.request import FinishReason, Request
from model_server.server.errors import ApiError
from model_server.server.prompts import ABSENT, Part, decoded, function_call, given, option
from model_server.server.refused import check
from model_server.server.replies import Delta, Reply, usage

_MOST_RESPONSES = 1000
_MOST_CHARACTERS = 2**24
"""The bounds of the kept conversations. The oldest is forgotten first."""
_MOST_DIMENSIONS = 1024
_DEFAULT_DIMENSIONS = 384

OWN_FORM_FIELD = {"/v1/messages": "output_config.format", "/v1/responses": "text.format"}
"""What `response_format` is called at these paths."""

_encode = msgspec.json.Encoder().encode


class MessagesBody(msgspec.Struct, kw_only=True):
    messages: msgspec.Raw
    max_tokens: int
    model: str | None = None
    system: msgspec.Raw = ABSENT
    stop_sequences: msgspec.Raw = ABSENT
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = False
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    container: msgspec.Raw = ABSENT
    mcp_servers: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT


_NEUTRAL_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "thinking": ({"type": "disabled"},),
    "container": (),
    "mcp_servers": ([],),
}


class _MessagesChoice(msgspec.Struct):
    type: Literal["auto", "none", "any", "tool"]
    name: str = ""


class _OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: _OutputFormat | None = None


class _MessagesTool(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = msgspec.field(default_factory=dict)


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: msgspec.Raw
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    background: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT
    top_logprobs: msgspec.Raw = ABSENT


_NEUTRAL_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    "reasoning": ({},),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}


class _TextFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class _TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: _TextFormat | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[Part] = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    input: msgspec.Raw
    model: str | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None


def chat_of_messages(body: MessagesBody) -> bytes:
    """Return the chat body. The messages stay raw JSON, which the request reader measures before it decodes
    them.
    """
    check(body, _NEUTRAL_IN_MESSAGES)
    messages = bytes(body.messages).lstrip()
    if not messages.startswith(b"["):
        raise ApiError("messages must be a list.", param="messages")
    if given(body.system):
        messages = b'[{"role":"system","content":%b},%b' % (bytes(body.system), messages[1:])
    tools: list[_MessagesTool] | None = option(body.tools, list[_MessagesTool], param="tools")
    choice: _MessagesChoice | None = option(body.tool_choice, _MessagesChoice, param="tool_choice")
    config: _OutputConfig | None = option(body.output_config, _OutputConfig, param="output_config")
    rest = {
        "model": body.model,
        "max_tokens": body.max_tokens,
        "tool_choice": _chat_choice(choice),
        "response_format": _chat_format(config),
        "stop": option(body.stop_sequences, list[str], param="stop_sequences"),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
        "tools": [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in tools or ()
        ],
    }
    return b'{"messages":%b,%b' % (messages, _encode(rest)[1:])


def _chat_choice(choice: _MessagesChoice | None) -> object:
    if choice is not None and choice.type == "tool":
        return {"function": {"name": choice.name}}
    return "required" if choice is not None and choice.type == "any" else None


def _chat_format(config: _OutputConfig | _TextConfig | None) -> object:
    if config is None or config.format is None:
        return None
    return {"type": config.format.type, "json_schema": {"schema": config.format.schema}}


class Responses:
    """The conversations of earlier responses, by id. Ids are random, so a client knows only its own."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self._characters = 0

    def keep(self, response_id: str, messages: list[dict[str, Any]]) -> None:
        self._kept[response_id] = messages
        self._characters += _size(messages)
        while len(self._kept) > _MOST_RESPONSES or self._characters > _MOST_CHARACTERS:
            self._characters -= _size(self._kept.popitem(last=False)[1])

    def chat_of(self, body: ResponsesBody) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the chat body, and its messages without the instructions, which a later response does not
        inherit.
        """
        check(body, _NEUTRAL_IN_RESPONSES)
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            found = self._kept.get(body.previous_response_id)
            if found is None:
                raise ApiError("This response is not kept here.", param="previous_response_id")
            before = found
        messages = [*before, *_items(body.input)]
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        config: _TextConfig | None = option(body.text, _TextConfig, param="text")
        rest = {
            "model": body.model,
            "messages": [*system, *messages],
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
            "response_format": _chat_format(config),
        }
        # The tools stay raw JSON, which the request reader measures.
        tools, choice = bytes(body.tools) or b"null", bytes(body.tool_choice) or b"null"
        return b'{"tools":%b,"tool_choice":%b,%b' % (tools, choice, _encode(rest)[1:]), messages


def completion_of_embeddings(body: EmbeddingsBody) -> bytes:
    if body.encoding_format not in (None, "float", "base64"):
        raise ApiError("encoding_format must be float or base64.", param="encoding_format")
    if body.dimensions is not None and not 1 <= body.dimensions <= _MOST_DIMENSIONS:
        raise ApiError(f"dimensions must be 1 to {_MOST_DIMENSIONS}.", param="dimensions")
    rest = {"model": body.model, "max_tokens": 1, "ignore_eos": True}
    return b'{"prompt":%b,%b' % (bytes(body.input), _encode(rest)[1:])


class MessagesReply(Reply):
    """An answer in the shape of Anthropic's API."""

    _last: Delta | None = None

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        [delta], [request] = deltas, requests
        call = self.call(delta)
        content = {"text": delta.text} if call is None else {"input": msgspec.json.decode(call[1])}
        return {
            **self._message([{**self._block(call), **content}], _tokens(request)),
            **self._stopped(delta),
        }

    def begin(self, requests: Sequence[Request]) -> list[bytes]:
        counted = {**_tokens(requests[0]), "output_tokens": 0}
        return [_named("message_start", {"message": self._message([], counted)})]

    def event(self, delta: Delta, *, request: Request | None = None) -> bytes:
        del request
        call, first, self._last = self.call(delta), self._last is None, delta
        begun = (
            _named("content_block_start", {"index": 0, "content_block": self._block(call)}) if first else b""
        )
        part = {"type": "text_delta", "text": delta.text}
        if call is not None:
            part = {"type": "input_json_delta", "partial_json": call[1]}
        return begun + _named("content_block_delta", {"index": 0, "delta": part})

    def end(self, requests: Sequence[Request]) -> list[bytes]:
        assert self._last is not None, "an answer has an end"
        ended = {"delta": self._stopped(self._last), "usage": _tokens(requests[0])}
        return [
            _named("content_block_stop", {"index": 0}),
            _named("message_delta", ended),
            _named("message_stop", {}),
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


class ResponsesReply(Reply):
    """An answer in the shape of OpenAI's responses. The conversation is kept when the answer has ended."""

    def __init__(
        self, *, body: ResponsesBody, messages: Sequence[dict[str, Any]], kept_by: Responses, **head: Any
    ) -> None:
        super().__init__(**head)
        self._body = body
        self._messages = messages
        self._kept_by = kept_by
        self._asked: dict[str, Any] = {"tool_choice": "auto", "tools": []}
        if self._calls:
            self._asked = {name: decoded(getattr(body, name), Any, param=name) for name in self._asked}
        self._text, self._number = "", 0
        self._last: Delta | None = None
        self._place = {"item_id": f"msg_{self.reply_id}", "output_index": 0}
        self._place_of_text = {**self._place, "content_index": 0}

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        [delta], [request] = deltas, requests
        self._text = delta.text
        return self._ended(delta, request)

    def begin(self, requests: Sequence[Request]) -> list[bytes]:
        del requests
        return [
            self._numbered("response.created", {"response": self._response("in_progress")}),
            self._numbered("response.in_progress", {"response": self._response("in_progress")}),
        ]

    def event(self, delta: Delta, *, request: Request | None = None) -> bytes:
        del request
        call, first, self._last = self.call(delta), self._last is None, delta
        self._text += delta.text
        events = b""
        if first:
            begun = self._item([], call and (call[0], ""))
            events += self._numbered("response.output_item.added", {"output_index": 0, "item": begun})
        if call is not None:
            arguments = {**self._place, "delta": call[1]}
            return events + self._numbered("response.function_call_arguments.delta", arguments)
        if first:
            events += self._numbered(
                "response.content_part.added", {**self._place_of_text, "part": _part("")}
            )
        text = {**self._place_of_text, "delta": delta.text, "logprobs": []}
        return events + self._numbered("response.output_text.delta", text)

    def end(self, requests: Sequence[Request]) -> list[bytes]:
        assert self._last is not None, "an answer has an end"
        answer, call, place = self._ended(self._last, requests[0]), self.call(self._last), self._place_of_text
        ends = [
            ("output_text.done", {**place, "text": self._text, "logprobs": []}),
            ("content_part.done", {**place, "part": _part(self._text)}),
        ]
        if call is not None:
            named = {**self._place, "name": call[0], "arguments": call[1]}
            ends = [("function_call_arguments.done", named)]
        ends += [
            ("output_item.done", {"output_index": 0, "item": answer["output"][0]}),
            (answer["status"], {"response": answer}),
        ]
        return [self._numbered(f"response.{name}", fields) for name, fields in ends]

    def _ended(self, delta: Delta, request: Request) -> dict[str, Any]:
        if self._body.store is not False:
            call = self.call(delta)
            said: dict[str, Any] = {"role": "assistant", "content": self._text}
            if call is not None:
                said = _called(f"call_{self.reply_id}", *call)
            self._kept_by.keep(f"resp_{self.reply_id}", [*self._messages, said])
        cut_short = delta.finish_reason is FinishReason.LENGTH
        counted = usage([request])
        answer = self._response("incomplete" if cut_short else "completed")
        return {
            **answer,
            "output": [self._item([_part(self._text)], self.call(delta), status=answer["status"])],
            "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self.reply_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [],
            "previous_response_id": self._body.previous_response_id,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": False,
            **self._asked,
            "usage": None,
        }

    def _item(
        self, content: list[dict[str, Any]], call: tuple[str, str] | None, *, status: str = "in_progress"
    ) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._place["item_id"], "status": status}
        if call is None:
            return {**item, "type": "message", "role": "assistant", "content": content}
        called = {"call_id": f"call_{self.reply_id}", "name": call[0], "arguments": call[1]}
        return {**item, "type": "function_call", **called}

    def _numbered(self, name: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return _named(name, {"sequence_number": self._number - 1, **fields})


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


def _items(raw: msgspec.Raw) -> list[dict[str, Any]]:
    found: str | list[_Item] = decoded(raw, str | list[_Item], param="input")
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return [_message_of(item) for item in found]


def _message_of(item: _Item) -> dict[str, Any]:
    if item.type == "function_call":
        return _called(item.call_id, item.name, item.arguments)
    result = item.type == "function_call_output"
    role, content = ("tool", item.output) if result else (item.role, item.content)
    parts = [Part("text", content)] if isinstance(content, str) else content
    text = all(part.type in ("text", "input_text", "output_text") for part in parts)
    if not (role and text and (result or item.type == "message")):
        raise ApiError("This model takes messages of text, calls and their outputs only.", param="input")
    return {"role": role, "content": "".join(part.text or "" for part in parts)}


def _called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [function_call(call_id, name, arguments)]}


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) + len(str(message.get("tool_calls", ""))) for message in messages)


def _tokens(request: Request) -> dict[str, int]:
    cached = request.num_cached_tokens or 0
    return {
        "input_tokens": request.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": request.num_output_tokens,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _named(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))
