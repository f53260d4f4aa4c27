"""Routed prompts of clients' requests, and the conversations and templates that several tests use."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from epp.base.types import EndpointName
from epp.config.policy import Chunks
from epp.picker.server_caches import hash_chain
from epp.request.parse import parse_request
from epp.sources.kvevents.mapping import Tokens
from epp.sources.kvevents.routed_prompts import RoutedPrompt

SCHEDULE = Chunks(size_bytes=32, later_size_bytes=32, later_from_bytes=0)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TALK = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
THINKS_LAST = "{% if enable_thinking is false %}no thoughts{% endif %}{{ effort or '' }}"


def routed_to_path(path: str, *, adapter: str = "", **body: Any) -> RoutedPrompt:
    inference = parse_request(path, json.dumps({"model": "m", **body}).encode())
    return RoutedPrompt(
        server=EndpointName("a"),
        adapter=adapter,
        inference=inference,
        chain=hash_chain(inference.prompt, seed=1, schedule=SCHEDULE),
        schedule=SCHEDULE,
    )


def routed_chat(*messages: dict[str, Any], **more: Any) -> RoutedPrompt:
    return routed_to_path("/v1/chat/completions", messages=list(messages), **more)


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


class NoLanguage:
    """The language of a model whose prompts are all token ids. To ask it is an error that nobody expects."""

    def tokens(self, text: str, *, special: bool) -> Tokens:
        raise ZeroDivisionError(text)

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None) -> str:
        raise ZeroDivisionError(messages)
