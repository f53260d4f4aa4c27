"""Bodies of real clients that are one prompt to the server. tests/contract/test_rendered_prompts.py asks vLLM
about many more.
"""

import json
from typing import Any

import pytest

from epp.request.parse import parse_request
from tests.unit.request.client_shapes import ASK, CHAT, MESSAGES, RESPONSES, TURNS, encoded, sent, text

LONG = "You help with code. " * 40
CALL = [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
USER = {"role": "user", "content": LONG}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
NEXT = {"role": "user", "content": "go on"}


def billed(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=9.9.{number}; cch={number};"


def media(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields, text(LONG)]}]


def turn(**thoughts: str) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "", "tool_calls": CALL, **thoughts}, RESULT]


EQUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "an empty system prompt": (MESSAGES, {"system": "", "messages": [USER]}, {"messages": [USER]}),
    "empty instructions": (RESPONSES, {"input": [USER], "instructions": ""}, {"input": [USER]}),
    "another billing block": (
        MESSAGES,
        {"system": [text(billed(1)), text(LONG)], "messages": [USER]},
        {"system": [text(billed(2)), text(LONG)], "messages": [USER]},
    ),
    "the uuid of media": (
        CHAT,
        {"messages": media(type="image_url", image_url={"url": "data:,a"}, uuid="u1")},
        {"messages": media(type="image_url", image_url=None, uuid="u1")},
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
