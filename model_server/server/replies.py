"""Builds answers of the OpenAI API, whole or in chunks. This module handles plain data, and neither waits nor
sends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from model_server.core.request import FinishReason, Request
from model_server.server.structured import Calls, call_in

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TokenReport:
    """One token with its log probability, and the most likely tokens in its place with their log
    probabilities.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. A delta with a `finish_reason` is the last delta of its choice."""

    index: int
    text: str
    finish_reason: FinishReason | None
    reports: tuple[TokenReport, ...] | None = None
    """The log probabilities of the delta's tokens. None means that the client did not ask for them."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the answer, if one did."""


def usage(requests: Sequence[Request], *, answers_each: int = 1) -> dict[str, Any]:
    """Return the usage. `answers_each` consecutive requests have the same prompt, which counts once."""
    prompt = sum(request.num_prompt_tokens for request in requests[::answers_each])
    completion = sum(request.num_output_tokens for request in requests)
    cached = sum(request.num_cached_tokens or 0 for request in requests[::answers_each])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error_event(body: object) -> bytes:
    """Return the event of an error after a stream's headers were sent. No `[DONE]` follows the event."""
    return b"data: %b\n\n" % _encode(body)


class Reply:
    """Builds the parts of one HTTP answer."""

    def __init__(
        self,
        *,
        reply_id: str,
        chat: bool,
        model: str,
        created: int,
        answers_each: int = 1,
        include_usage: bool = False,
        calls: Calls = "",
    ) -> None:
        self._calls = calls
        self.reply_id, self.model, self.created = reply_id, model, created
        self._include_usage = include_usage
        self._chat = chat
        self._answers_each = answers_each
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{reply_id}",
            "object": "",
            "created": created,
            "model": model,
        }
        self._sent_characters: Counter[int] = Counter()

    def whole(self, deltas: Sequence[Delta], requests: Sequence[Request]) -> dict[str, Any]:
        """Return the whole answer. `deltas` has one entry for each choice, with all of its text, in any
        order.
        """
        choices = []
        for delta in sorted(deltas, key=lambda delta: delta.index):
            shape: dict[str, Any] = (
                {"message": {"role": "assistant", **self._said(delta)}}
                if self._chat
                else {"text": delta.text}
            )
            choices.append(self._choice(delta, shape))
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(requests)}

    def begin(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the events before the first text."""
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self._event([{"index": n, **first}]) for n in range(len(requests))] if self._chat else []

    def event(self, delta: Delta, *, request: Request | None = None) -> bytes:
        """Return an event. `request` is the request whose usage so far the client wants in each event."""
        shape: dict[str, Any] = {"delta": self._said(delta)} if self._chat else {"text": delta.text}
        so_far = {} if request is None else {"usage": usage([request])}
        return self._event([self._choice(delta, shape)], **so_far)

    def end(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the events after the last text."""
        counted = [self._event([], usage=self._usage(requests))] if self._include_usage else []
        return [*counted, DONE]

    def call(self, delta: Delta) -> tuple[str, str] | None:
        """Return the name and the arguments of the call that the answer is. None means a text."""
        return call_in(delta.text) if self._calls else None

    def _said(self, delta: Delta) -> dict[str, Any]:
        if (call := self.call(delta)) is None:
            return {"content": delta.text}
        function = {"name": call[0], "arguments": call[1]}
        call_id = f"call_{self.reply_id}_{delta.index}"
        tool_calls = [{"index": 0, "id": call_id, "type": "function", "function": function}]
        return {"content": None, "tool_calls": tool_calls}

    def _usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        return usage(requests, answers_each=self._answers_each)

    def _choice(self, delta: Delta, shape: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if delta.reports is not None:
            reports = delta.reports
            logprobs = _chat_logprobs(reports) if self._chat else self._logprobs(delta.index, reports)
        # As in vLLM, a call of a named tool ends with "stop".
        ended = self._calls == "required" and delta.finish_reason is FinishReason.STOP
        calls = ended and self.call(delta) is not None
        return {
            "index": delta.index,
            **shape,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, index: int, reports: Sequence[TokenReport]) -> dict[str, Any]:
        offsets = []
        for token in reports:
            offsets.append(self._sent_characters[index])
            self._sent_characters[index] += len(token.text)
        return {
            "tokens": [token.text for token in reports],
            "token_logprobs": [token.logprob for token in reports],
            # Two ids may have the same text. The more likely id comes first, and its entry stays.
            "top_logprobs": [{token.text: token.logprob} | dict(reversed(token.top)) for token in reports],
            "text_offset": offsets,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: %b\n\n" % _encode({**self._head, "object": kind, "choices": choices, **more})


def _chat_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    content = [
        {**_token(token.text, token.logprob), "top_logprobs": [_token(*one) for one in token.top]}
        for token in reports
    ]
    return {"content": content}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
