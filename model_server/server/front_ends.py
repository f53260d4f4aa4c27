"""Further front ends of the same engine: `/v1/messages`, `/v1/responses` and `/v1/embeddings`.

Each body becomes the body of a chat or a completion, which the request reader reads and bounds. Each answer
has its API's own shape, whole or streamed. Fields that change an answer and are not done are refused. Tools
reach the chat template, and calls are not parsed. Embeddings are made up from a hash of the prompt. This
module does no I/O. Caller: the routes.
"""

from __future__ import annotations

import base64
import random
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from model_server.core.request import FinishReason, Request
from model_server.server.errors import ApiError
from model_server.server.prompts import ABSENT, Part, decoded, given, option
from model_server.server.refused import check
from model_server.server.replies import Delta, Reply, usage

_MOST_RESPONSES = 1000
_MOST_CHARACTERS = 2**24
"""The bounds of the kept conversations. The oldest is forgotten first."""
_MOST_DIMENSIONS = 1024
_DEFAULT_DIMENSIONS = 384

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
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "container": (),
    "mcp_servers": ([],),
    "output_config": ({},),
}


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
    "tool_choice": ("none", "auto"),
    "text": ({}, {"format": {"type": "text"}}),
    "reasoning": ({},),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}


class _Item(msgspec.Struct):
    role: str
    content: str | list[Part]
    type: str = "message"


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
    rest = {
        "model": body.model,
        "max_tokens": body.max_tokens,
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


class Responses:
    """The conversations of earlier responses, by id. Ids are random, so a client knows only its own."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[dict[str, str]]] = OrderedDict()
        self._characters = 0

    def keep(self, response_id: str, messages: list[dict[str, str]]) -> None:
        self._kept[response_id] = messages
        self._characters += _size(messages)
        while len(self._kept) > _MOST_RESPONSES or self._characters > _MOST_CHARACTERS:
            self._characters -= _size(self._kept.popitem(last=False)[1])

    def chat_of(self, body: ResponsesBody) -> tuple[bytes, list[dict[str, str]]]:
        """Return the chat body, and its messages without the instructions, which a later response does not
        inherit.
        """
        check(body, _NEUTRAL_IN_RESPONSES)
        before: list[dict[str, str]] = []
        if body.previous_response_id is not None:
            found = self._kept.get(body.previous_response_id)
            if found is None:
                raise ApiError("This response is not kept here.", param="previous_response_id")
            before = found
        messages = [*before, *_items(body.input)]
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        rest = {
            "model": body.model,
            "messages": [*system, *messages],
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
        }
        tools = bytes(body.tools) or b"null"
        return b'{"tools":%b,%b' % (tools, _encode(rest)[1:]), messages


def completion_of_embeddings(body: EmbeddingsBody) -> bytes:
    if body.encoding_format not in (None, "float", "base64"):
        raise ApiError("encoding_format must be float or base64.", param="encoding_format")
    if body.dimensions is not None and not 1 <= body.dimensions <= _MOST_DIMENSIONS:
        raise ApiError(f"dimensions must be 1 to {_MOST_DIMENSIONS}.", param="dimensions")
    rest = {"model": body.model, "max_tokens": 1, "ignore_eos": True}
    return b'{"prompt":%b,%b' % (bytes(body.input), _encode(rest)[1:])


class MessagesReply(Reply):
    """An answer in the shape of Anthropic's API."""

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        [delta], [request] = deltas, requests
        return {
            **self._message([{"type": "text", "text": delta.text}], _tokens(request)),
            **_stopped(delta),
        }

    def begin(self, requests: Sequence[Request]) -> list[bytes]:
        counted = {**_tokens(requests[0]), "output_tokens": 0}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return [
            _named("message_start", {"message": self._message([], counted)}),
            _named("content_block_start", block),
        ]

    def event(self, delta: Delta, *, request: Request | None = None) -> bytes:
        del request
        self._last = delta
        text = {"index": 0, "delta": {"type": "text_delta", "text": delta.text}}
        return _named("content_block_delta", text)

    def end(self, requests: Sequence[Request]) -> list[bytes]:
        ended = {"delta": _stopped(self._last), "usage": _tokens(requests[0])}
        return [
            _named("content_block_stop", {"index": 0}),
            _named("message_delta", ended),
            _named("message_stop", {}),
        ]

    def _message(self, content: list[dict[str, str]], counted: dict[str, int]) -> dict[str, Any]:
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
        self, *, body: ResponsesBody, messages: Sequence[dict[str, str]], kept_by: Responses, **head: Any
    ) -> None:
        super().__init__(**head)
        self._body = body
        self._messages = messages
        self._kept_by = kept_by
        self._text, self._number = "", 0

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        [delta], [request] = deltas, requests
        self._text = delta.text
        return self._ended(delta, request)

    def begin(self, requests: Sequence[Request]) -> list[bytes]:
        del requests
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._numbered("response.created", {"response": self._response("in_progress")}),
            self._numbered("response.in_progress", {"response": self._response("in_progress")}),
            self._numbered("response.output_item.added", {"output_index": 0, "item": self._item([])}),
            self._numbered("response.content_part.added", {**place, "part": _part("")}),
        ]

    def event(self, delta: Delta, *, request: Request | None = None) -> bytes:
        del request
        self._last = delta
        self._text += delta.text
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._numbered("response.output_text.delta", {**place, "delta": delta.text, "logprobs": []})

    def end(self, requests: Sequence[Request]) -> list[bytes]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        answer, part = self._ended(self._last, requests[0]), _part(self._text)
        return [
            self._numbered("response.output_text.done", {**place, "text": self._text, "logprobs": []}),
            self._numbered("response.content_part.done", {**place, "part": part}),
            self._numbered("response.output_item.done", {"output_index": 0, "item": answer["output"][0]}),
            self._numbered(f"response.{answer['status']}", {"response": answer}),
        ]

    @property
    def _item_id(self) -> str:
        return f"msg_{self.reply_id}"

    def _ended(self, delta: Delta, request: Request) -> dict[str, Any]:
        if self._body.store is not False:
            said = {"role": "assistant", "content": self._text}
            self._kept_by.keep(f"resp_{self.reply_id}", [*self._messages, said])
        cut_short = delta.finish_reason is FinishReason.LENGTH
        counted = usage([request])
        answer = self._response("incomplete" if cut_short else "completed")
        return {
            **answer,
            "output": [self._item([_part(self._text)], status=answer["status"])],
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
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }

    def _item(self, content: list[dict[str, Any]], *, status: str = "in_progress") -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

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


def _items(raw: msgspec.Raw) -> list[dict[str, str]]:
    found: str | list[_Item] = decoded(raw, str | list[_Item], param="input")
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    messages = []
    for item in found:
        parts = [Part("text", item.content)] if isinstance(item.content, str) else item.content
        known = item.type == "message" and all(p.type in ("text", "input_text", "output_text") for p in parts)
        if not known:
            raise ApiError("This model takes messages of text only.", param="input")
        messages.append({"role": item.role, "content": "".join(part.text or "" for part in parts)})
    return messages


def _size(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def _tokens(request: Request) -> dict[str, int]:
    cached = request.num_cached_tokens or 0
    return {
        "input_tokens": request.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": request.num_output_tokens,
    }


def _stopped(delta: Delta) -> dict[str, Any]:
    if isinstance(delta.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    cut_short = delta.finish_reason is FinishReason.LENGTH
    return {"stop_reason": "max_tokens" if cut_short else "end_turn", "stop_sequence": None}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _named(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))
