"""What a template gets of a request: its conversation, from the canonical prompt, and its own fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.sources.kvevents.template_input import UnmappedError, read_conversation, read_shaping
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


def arguments(**fields: Any) -> dict[str, Any]:
    return dict(read_shaping(json.dumps(fields).encode()).arguments)


def test_fields_that_are_not_set_are_not_template_arguments() -> None:
    assert arguments(documents=None, reasoning_effort="auto") == {"enable_thinking": True}
    assert arguments(documents=[{"text": "a"}]) == {"documents": [{"text": "a"}]}
    assert read_shaping(b"").arguments == {}


def test_the_effort_of_a_request_turns_thinking_on_or_off_unless_the_request_says_so_itself() -> None:
    assert arguments(reasoning_effort="none") == {"enable_thinking": False, "reasoning_effort": "none"}
    assert arguments(reasoning_effort="high")["enable_thinking"] is True
    own = {"enable_thinking": False}
    assert arguments(reasoning_effort="high", chat_template_kwargs=own)["enable_thinking"] is False


def test_arguments_that_change_only_what_follows_the_last_text_are_dropped() -> None:
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    assert arguments(chat_template_kwargs={**ends, "effort": 3}) == {"effort": 3}


@pytest.mark.parametrize(("sent", "expected"), [(True, True), (False, False), ("yes", None), (None, None)])
def test_only_a_boolean_decides_whether_the_tokenizer_adds_its_own_tokens(
    *, sent: object, expected: bool | None
) -> None:
    assert read_shaping(json.dumps({"add_special_tokens": sent}).encode()).special_tokens is expected
