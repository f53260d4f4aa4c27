"""The next turn's bytes begin with a conversation's canonical bytes, and different texts stay different."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.request.asked import parse

EXAMPLES = 150
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)


texts = st.text(max_size=30)
text_parts = st.builds(lambda text: {"type": "text", "text": text}, texts)
images = st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, texts)
contents = st.one_of(st.none(), texts, st.lists(st.one_of(text_parts, images, texts), max_size=3))
calls = st.builds(
    lambda name: [{"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}], texts
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents},
    optional={"name": texts, "tool_call_id": texts, "tool_calls": calls},
)
conversations = st.lists(messages, min_size=1, max_size=5)
tool_lists: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.just([]), st.just([{"type": "function", "function": {"name": "f"}}])
)
# The name of the conversation in each API, and other places of text.
dialects = st.sampled_from(
    [(CHAT, "messages", ""), (MESSAGES, "messages", "system"), (RESPONSES, "input", "instructions")]
)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    dialect=dialects,
    turns=conversations,
    later=conversations,
    tools=tool_lists,
    system=st.one_of(st.none(), texts),
)
def test_the_prompt_of_a_conversation_is_a_byte_prefix_of_its_next_turn(
    dialect: tuple[str, str, str], turns: list[Any], later: list[Any], tools: Any, system: str | None
) -> None:
    path, field, system_field = dialect
    around = {"tools": tools} | ({system_field: system} if system_field else {})
    now = parse(path, **{field: turns, **around}).prompt
    then = parse(path, **{field: turns + later, **around}).prompt
    assert then.startswith(now)
    assert len(then) > len(now)


@settings(max_examples=EXAMPLES, deadline=None)
@given(one=conversations, other=conversations)
def test_conversations_that_differ_in_text_never_give_equal_bytes(one: list[Any], other: list[Any]) -> None:
    def texts_of(turns: list[Any]) -> list[Any]:
        return [
            (turn["role"], turn.get("name") or None, turn.get("tool_call_id") or None, flat(turn))
            for turn in turns
        ]

    def flat(turn: Any) -> Any:
        content = turn["content"] or ""
        parts = content if isinstance(content, list) else [content]
        texts = [part["text"] if isinstance(part, dict) and "text" in part else part for part in parts]
        return (texts if texts != [] else [""], turn.get("tool_calls"))

    equal = parse(CHAT, messages=one).prompt == parse(CHAT, messages=other).prompt
    assert equal == (texts_of(one) == texts_of(other))
