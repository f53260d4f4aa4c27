"""The canonical prompt: which bodies give equal bytes, and which differ."""

import json
from typing import Any

import pytest

from epp.base.types import ApiKind
from tests.unit.request.asked import CHAT, chat_prompt, parse

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


@pytest.mark.parametrize(
    "content",
    [
        "héllo",
        [{"type": "text", "text": "héllo"}],
        ["héllo"],
        [{"type": "text", "text": "héllo", "cache_control": {"type": "ephemeral"}}],
        [{"text": "héllo"}],
        [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "héllo"}],
        [{"type": "text", "text": None}, {"type": "text", "text": "héllo"}],
    ],
)
def test_a_string_and_one_text_part_are_equal(content: Any) -> None:
    assert chat_prompt(content) == b"\xffuser\xfe" + "héllo".encode()
    assert parse(MESSAGES, messages=[{"role": "user", "content": content}]).prompt == chat_prompt(content)


def test_no_content_reads_as_empty() -> None:
    assert chat_prompt(None) == chat_prompt("") == chat_prompt([]) == b"\xffuser\xfe"


def test_the_boundary_between_two_texts_counts() -> None:
    def two(*contents: str) -> bytes:
        return parse(CHAT, messages=[{"role": "user", "content": each} for each in contents]).prompt

    rendered = {
        two("ab", "c"),
        two("a", "bc"),
        two("abc"),
        chat_prompt(["ab", "c"]),
        chat_prompt(["a", "bc"]),
        chat_prompt("a\nbc"),
    }
    assert len(rendered) == 6


def test_role_name_and_tool_call_id_count() -> None:
    rendered = {
        chat_prompt("x"),
        chat_prompt("x", name="ann"),
        chat_prompt("x", name="bob"),
        chat_prompt("x", tool_call_id="ann"),
    }
    assert len(rendered) == 4
    assert parse(CHAT, messages=[{"role": "custom", "content": "x"}]).prompt == b"\xffcustom\xfex"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 9000}},
            {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 8999}},
        ),
        (
            {"type": "image", "source": {"type": "base64", "data": "QQ=="}},
            {"type": "image", "source": {"type": "base64", "data": "Qg=="}},
        ),
    ],
)
def test_media_are_distinguished_by_hash_and_never_copied(one: dict[str, Any], other: dict[str, Any]) -> None:
    text = {"type": "text", "text": "what is this?"}
    assert chat_prompt([one, text]) != chat_prompt([other, text])
    assert len(chat_prompt([one, text])) < 100
    assert chat_prompt([dict(reversed(one.items())), text]) == chat_prompt([one, text])
    marks = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert chat_prompt([one | marks, text]) == chat_prompt([one, text])


def test_tools_come_first_and_an_empty_list_counts_as_no_tools() -> None:
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "description": "…"}}
    plain = parse(CHAT, messages=messages).prompt
    with_tools = parse(CHAT, messages=messages, tools=[tool]).prompt
    assert with_tools.endswith(plain)
    assert json.dumps([tool]).encode() in with_tools
    assert parse(CHAT, messages=messages, tools=[]).prompt == plain
    assert parse(CHAT, messages=messages, tools=None).prompt == plain


@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
def test_a_tool_call_follows_the_content_and_a_null_field_leaves_no_trace(field: str) -> None:
    call = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    assert chat_prompt("x", **{field: call}).startswith(chat_prompt("x"))
    assert chat_prompt("x", **{field: call}) != chat_prompt("x")
    assert chat_prompt("x", **{field: None}) == chat_prompt("x")


def test_the_anthropic_system_prompt_comes_between_tools_and_messages() -> None:
    messages = [{"role": "user", "content": "hi"}]
    blocks = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    rendered = parse(MESSAGES, messages=messages, system=blocks, tools=[{"name": "f"}]).prompt
    assert rendered.endswith(b"\xffsystem\xfebe kind\xffuser\xfehi")
    as_chat = [{"role": "system", "content": "be kind"}, *messages]
    assert parse(MESSAGES, messages=messages, system="be kind").prompt == parse(CHAT, messages=as_chat).prompt


# Responses


def test_a_responses_string_is_one_user_message_after_the_instructions() -> None:
    as_items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    for asked in ("hi", as_items):
        read = parse(RESPONSES, input=asked, instructions="be kind").prompt
        assert read == b"\xffsystem\xfebe kind\xffuser\xfehi"


def test_responses_items_other_than_messages_are_distinguished() -> None:
    def prompt(**item: Any) -> bytes:
        return parse(RESPONSES, input=[item]).prompt

    call = {"type": "function_call", "name": "f", "arguments": '{"a":1}'}
    rendered = {
        prompt(**call),
        prompt(**(call | {"name": "g"})),
        prompt(**(call | {"namespace": "n"})),
        prompt(**(call | {"arguments": "{}"})),
        prompt(type="function_call_output", call_id="1", output="sunny"),
        prompt(type="function_call_output", call_id="1", output=[{"type": "input_text", "text": "rain"}]),
        prompt(type="web_search_call", action={"query": "a"}),
        prompt(type="web_search_call", action={"query": "b"}),
        prompt(role="function_call", content="f"),
    }
    assert len(rendered) == 9
    assert prompt(**call, id="fc_1", status="completed") == prompt(**call)
    assert prompt(type="reasoning", summary=[]) == prompt(type="reasoning", encrypted_content="x") == b""


def test_previous_response_is_an_unknown_prefix_that_nothing_else_matches() -> None:
    plain = parse(RESPONSES, input="hi", instructions="be kind").prompt
    later = parse(RESPONSES, input="hi", instructions="be kind", previous_response_id="resp_1").prompt
    other = parse(RESPONSES, input="hi", instructions="be kind", previous_response_id="resp_2").prompt
    assert later.endswith(plain)
    assert len({later[:20], other[:20], plain[:20]}) == 3
    assert parse(RESPONSES, previous_response_id="resp_1").kind is ApiKind.RESPONSES


@pytest.mark.parametrize(
    ("path", "body", "opaque"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "ûÿ \x1c"}], "tools": [{"name": "û"}]}, False),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, True),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, False),
        ("/v1/completions", {"prompt": [0xFBFBFB]}, False),
        ("/v1/completions", {"prompt_embeds": "QUJD"}, True),
    ],
)
def test_a_prompt_whose_bytes_do_not_show_its_tokens_is_marked_as_opaque(
    path: str, body: dict[str, Any], *, opaque: bool
) -> None:
    assert any(parse(path, **body).media) is opaque
