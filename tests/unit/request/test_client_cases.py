"""What real clients send, and which prompts are equal to the server: two bodies, and what they share.

The prompts are those that vLLM 0.32 renders; tests/contract/test_rendered_prompts.py asks vLLM.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.request.parse import parse_request
from tests.unit.request.client_shapes import ASK, CHAT, MESSAGES, RESPONSES, TURNS, encoded, sent, text

LONG = "You help with code. " * 40
THOUGHT = "First I look at the tests. " * 40
OTHER = "Perhaps the parser is wrong. " * 40
CALL = [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
USER = {"role": "user", "content": LONG}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
USE = {"type": "tool_use", "id": "c1", "name": "ls", "input": {}}
USED = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a.py"}]}
NEXT = {"role": "user", "content": "go on"}


def billed(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=9.9.{number}; cch={number};"


def media(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields, text(LONG)]}]


def turn(**thoughts: str) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "", "tool_calls": CALL, **thoughts}, RESULT]


def anthropic_turn(thought: str) -> list[dict[str, Any]]:
    thinking = {"type": "thinking", "thinking": thought, "signature": "s"}
    return [USER, {"role": "assistant", "content": [thinking, USE]}, USED]


def items(thought: str) -> list[dict[str, Any]]:
    said = {"type": "reasoning_text", "text": thought}
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "content": [said]}
    call = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
    return [USER, reasoning, call, {"type": "function_call_output", "call_id": "c", "output": "a.py"}]


EQUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "billing block of a system list": (
        MESSAGES,
        {"system": [text(billed(1)), text(LONG)], "messages": [USER]},
        {"system": [text(billed(2)), text(LONG)], "messages": [USER]},
    ),
    "billing line of a system string": (
        MESSAGES,
        {"system": f"{billed(1)}\n{LONG}", "messages": [USER]},
        {"system": LONG, "messages": [USER]},
    ),
    "billing line of a plain chat": (
        CHAT,
        {"messages": [{"role": "system", "content": f"{billed(1)}\n{LONG}"}, USER]},
        {"messages": [{"role": "system", "content": f"{billed(2)}\n{LONG}"}, USER]},
    ),
    "thoughts before the last question": (
        CHAT,
        {"messages": [*turn(reasoning_content=THOUGHT), NEXT]},
        {"messages": [*turn(), NEXT]},
    ),
    "thinking before the last question": (
        MESSAGES,
        {"messages": [*anthropic_turn(THOUGHT), NEXT]},
        {"messages": [*anthropic_turn(OTHER), NEXT]},
    ),
    "reasoning items before the last question": (
        RESPONSES,
        {"input": [*items(THOUGHT), NEXT]},
        {"input": [*items(OTHER), NEXT]},
    ),
    "the uuid of media": (
        CHAT,
        {"messages": media(type="image_url", image_url={"url": "data:,a"}, uuid="u1")},
        {"messages": media(type="image_url", image_url=None, uuid="u1")},
    ),
}
DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning_content in a loop of tools": (
        CHAT,
        {"messages": turn(reasoning_content=THOUGHT)},
        {"messages": turn(reasoning_content=OTHER)},
    ),
    "a thinking part of a chat": (
        CHAT,
        {"messages": media(type="thinking", thinking=THOUGHT)},
        {"messages": media(type="thinking", thinking=OTHER)},
    ),
    "thinking in a loop of tools": (
        MESSAGES,
        {"messages": anthropic_turn(THOUGHT)},
        {"messages": anthropic_turn(OTHER)},
    ),
    "reasoning items": (RESPONSES, {"input": items(THOUGHT)}, {"input": items(OTHER)}),
    "media without a type": (
        CHAT,
        {"messages": media(image_url="https://img.example/cat.png")},
        {"messages": media(image_url="https://img.example/dog.png")},
    ),
    "the uuids of media": (
        CHAT,
        {"messages": media(type="image_url", image_url={"url": "data:,a"}, uuid="u1")},
        {"messages": media(type="image_url", image_url={"url": "data:,a"}, uuid="u2")},
    ),
    "documents": (
        CHAT,
        {"messages": [USER], "documents": [{"text": THOUGHT}]},
        {"messages": [USER], "documents": [{"text": OTHER}]},
    ),
}


def prompt(path: str, body: dict[str, Any]) -> bytes:
    read = parse_request(path, json.dumps(body).encode())
    assert read.unread == ""
    return read.prompt


@pytest.mark.parametrize("case", EQUAL)
def test_what_the_server_renders_equally_is_equal(case: str) -> None:
    path, one, other = EQUAL[case]
    assert prompt(path, one) == prompt(path, other)


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_the_server_renders_differs(case: str) -> None:
    path, one, other = DIFFERENT[case]
    assert prompt(path, one) != prompt(path, other)


@pytest.mark.parametrize("client", TURNS)
def test_the_second_turn_of_each_client_extends_its_first(client: str) -> None:
    prompts = []
    for turns in (1, 2):
        path, body = sent(client, turns=turns)
        read = parse_request(path, encoded(client, body))
        assert (read.unread, read.model, read.stream) == ("", "m", body.get("stream", False))
        prompts.append(read.prompt)
    assert prompts[1].startswith(prompts[0])
    assert ASK.encode() in prompts[0] != prompts[1]


def test_thoughts_count_by_their_size_until_the_next_question() -> None:
    body = {"messages": turn(reasoning_content="thought " * 10_000)}
    assert len(prompt(CHAT, body)) > 80_000
    longer = {"messages": [*body["messages"], {"role": "assistant", "content": "done"}]}
    assert prompt(CHAT, longer).startswith(prompt(CHAT, body))
    assert len(prompt(CHAT, {"messages": [*longer["messages"], NEXT]})) < 2000
