"""The front end of `/v1/responses`, with its conversations. An input item becomes a message of a chat, also a
call of a function and its output. This module does no I/O. Caller: the routes.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from model_server.core.request import FinishReason, Request
from model_server.server.errors import ApiError
from model_server.server.front_ends import NEUTRAL, FormatConfig, chat_format, named_event, passed, raw_fields
from model_server.server.prompts import ABSENT, PARTS, Part, PromptReader, decoded, function_call, option
from model_server.server.refused import check
from model_server.server.replies import Delta, Reply, usage

_MOST_RESPONSES = 1000
_MOST_CHARACTERS = 2**24
_CHARACTERS_OF_A_MESSAGE = 200
"""The bounds of the kept conversations. An empty message counts too. The oldest is forgotten first."""
NEUTRAL_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "reasoning": ({},),
    "include_reasoning": (True,),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "skip_special_tokens": (True,),
    "enable_response_messages": (False,),
    "previous_input_messages": (),
}


class ResponsesBody(raw_fields(NEUTRAL_IN_RESPONSES), kw_only=True):  # type: ignore[misc, call-arg]  # from the list
    input: msgspec.Raw
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: int | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class Responses:
    """The conversations of earlier responses, by id. Ids are random, so a client knows only its own."""

    def __init__(self, prompts: PromptReader) -> None:
        self._prompts = prompts
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = OrderedDict()
        """The messages of each conversation, its last answer, and the characters of both."""
        self._characters = 0

    def keep(self, answer: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        size = sum(_CHARACTERS_OF_A_MESSAGE + len(msgspec.json.encode(each)) for each in (answer, *messages))
        self._kept[answer["id"]] = messages, answer, size
        self._characters += size
        while len(self._kept) > _MOST_RESPONSES or self._characters > _MOST_CHARACTERS:
            self.forget(next(iter(self._kept)))

    def stored(self, response_id: str) -> dict[str, Any] | None:
        return self._kept[response_id][1] if response_id in self._kept else None

    def forget(self, response_id: str) -> None:
        self._characters -= self._kept.pop(response_id)[2]

    def chat_of(self, body: ResponsesBody) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the chat body, and its messages without the instructions, which a later response does not
        inherit.
        """
        check(body, NEUTRAL_IN_RESPONSES)
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            kept = self._kept.get(body.previous_response_id)  # the other thread may forget it meanwhile
            if kept is None:
                raise ApiError("This response is not kept here.", param="previous_response_id")
            before = kept[0]
        found: str | list[_Item] = self._prompts.turns(body.input, str | list[_Item], param="input")
        items = [_Item(role="user", content=found)] if isinstance(found, str) else found
        # Earlier thoughts are left out, as templates do.
        messages = [*before, *(_message_of(item) for item in items if item.type != "reasoning")]
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        config: FormatConfig | None = option(body.text, FormatConfig, param="text")
        rest = {
            "messages": [*system, *messages],
            "max_tokens": body.max_output_tokens,
            "response_format": chat_format(config),
        }
        # The tools stay raw JSON, which the request reader measures.
        tools, choice = bytes(body.tools) or b"null", bytes(body.tool_choice) or b"null"
        asked = b'{%b"tools":%b,"tool_choice":%b,%b'
        return asked % (passed(body), tools, choice, msgspec.json.encode(rest)[1:]), messages


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
        begun = {"response": self._response("in_progress")}
        return [self._numbered(f"response.{name}", begun) for name in ("created", "in_progress")]

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
        cut_short = delta.finish_reason is FinishReason.LENGTH
        counted, call = usage([request]), self.call(delta)
        answer = self._response("incomplete" if cut_short else "completed")
        answer |= {
            "output": [self._item([_part(self._text)], call, status=answer["status"])],
            "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }
        if self._body.store is not False:
            turn: dict[str, Any] = {"role": "assistant", "content": self._text}
            if call is not None:
                turn = _called(f"call_{self.reply_id}", *call)
            self._kept_by.keep(answer, [*self._messages, turn])
        return answer

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
        return named_event(name, {"sequence_number": self._number - 1, **fields})


def _message_of(item: _Item) -> dict[str, Any]:
    if item.type == "function_call":
        return _called(item.call_id, item.name, item.arguments)
    result = item.type == "function_call_output"
    role, content = ("tool", item.output) if result else (item.role, item.content)
    known = isinstance(content, str) or all(part.type in PARTS for part in content or ())
    if not (role and known and (result or item.type == "message")):
        kinds = "messages of text and pictures, calls and their outputs"
        raise ApiError(f"This model takes {kinds} only.", param="input")
    return {"role": role, "content": content}


def _called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [function_call(call_id, name, arguments)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
