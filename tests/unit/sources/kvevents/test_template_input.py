"""What a template gets of a request: its conversation, from the canonical prompt, and its own fields."""

from __future__ import annotations

from typing import Any

import pytest

from epp.sources.kvevents.mapping import UnmappedError, read_conversation
from tests.unit.sources.kvevents.routed import CALL, message, routed_chat


@pytest.mark.parametrize(
    "messages",
    [
        [message("user", "hello")],
        [
            message("system", "ünïcödé"),
            message("user", "漢字"),
            message("assistant", ""),
            message("user", " spaces "),
        ],
        [message("user", "who?", name="bob"), message("assistant", "I", tool_calls=[CALL])],
        [message("tool", "42", tool_call_id="c1")],
        [message("custom", "role")],
        [message("user", "why?"), message("assistant", "so", reasoning="hm", reasoning_content="hm")],
    ],
)
def test_messages_come_back_from_the_canonical_prompt(messages: list[dict[str, Any]]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prompt = routed_chat(*messages, tools=tools).inference.prompt
    read = read_conversation(prompt)
    assert list(read.messages) == messages
    assert read.tools == tools
    assert [prompt[t.start : t.end].decode() for t in read.texts] == [m["content"] for m in messages]


def test_several_text_parts_stay_separate() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    read = read_conversation(routed_chat(message("user", parts)).inference.prompt)
    assert [m["content"] for m in read.messages] == [["one", "two"]]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "tool_result", "tool_use_id": "x", "content": "42"}],
    ],
)
def test_content_that_the_canonical_prompt_does_not_keep_is_refused(content: Any) -> None:
    with pytest.raises(UnmappedError):
        read_conversation(routed_chat(message("user", content)).inference.prompt)


@pytest.mark.parametrize("prompt", [b"no section at all", b""], ids=["a plain text", "nothing"])
def test_a_prompt_without_sections_is_a_conversation_without_messages(prompt: bytes) -> None:
    read = read_conversation(prompt)
    assert (list(read.messages), read.tools, list(read.texts)) == ([], None, [])
