"""Prompts are mapped to the names of their blocks, through the canonical prompt's conversation."""

from collections.abc import Sequence
from typing import Any

import pytest

from epp.picker.prefix_index.table import end_bytes
from epp.sources.kvevents.decoding import BlockHasher
from epp.sources.kvevents.language import FolderLanguage
from epp.sources.kvevents.mapping import Language, Text, UnmappedError, align, map_prompt, read_conversation
from epp.sources.kvevents.routed_prompts import RoutedPrompt
from tests.unit.sources.kvevents.routed import (
    CALL,
    SCHEDULE,
    NoLanguage,
    message,
    routed_chat,
    routed_to_path,
)

TOOL_RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "42"}
NUMBERS = [1e-310] * 10_000
"""A decoder takes 4 us a byte for these, and nothing else runs at that time."""


def blocks_at(
    prompt: RoutedPrompt, language: Language, *, block_tokens: int = 4
) -> tuple[Sequence[int], Sequence[int]]:
    mapped = map_prompt(
        prompt,
        language=language,
        hasher=BlockHasher("sha256"),
        block_tokens=block_tokens,
        adapter_path=None,
    )
    return mapped.blocks, mapped.ends_blocks


def test_chunks_of_a_common_beginning_have_the_same_blocks(language: FolderLanguage) -> None:
    start = message("system", "the quick brown fox jumps over the lazy dog " * 5)
    one, ends_one = blocks_at(routed_chat(start, message("user", "pack my box with five")), language)
    two, ends_two = blocks_at(routed_chat(start, message("user", "漢字 dozen jugs " * 9)), language)
    common = len(routed_chat(start).inference.prompt) // SCHEDULE.size_bytes
    assert ends_one[:common] == ends_two[:common]
    assert one[: ends_one[common - 1]] == two[: ends_two[common - 1]]
    assert ends_one[common - 1] > 8


@pytest.mark.parametrize(
    "content", ["plain words here " * 9, "ünïcödé 漢字 " * 9, "  padded  " * 9, "漢" * 90]
)
def test_a_chunk_has_the_blocks_of_the_tokens_that_end_within_it(
    language: FolderLanguage, content: str
) -> None:
    """The test counts the tokens from the rendered text of the beginning of the prompt."""
    prompt = routed_chat(message("user", content))
    _, ends = blocks_at(prompt, language)
    rendered = language.render([message("user", content)], tools=None)
    tokens = language.tokens(rendered, special=False)
    stripped = content.strip()
    shift = len(content) - len(content.lstrip())
    for chunk, found in enumerate(ends, 1):
        end = end_bytes(SCHEDULE, chunk)
        inside = len(prompt.inference.prompt[:end].partition(b"\xfe")[2].decode(errors="ignore"))
        chars = rendered.index(stripped) + min(max(inside - shift, 0), len(stripped))
        whole = sum(e <= chars for e in tokens.ends) // 4
        assert abs(found - whole) <= 1
        assert found <= len(tokens.ids) // 4


def test_letters_of_several_bytes_count_when_they_are_whole() -> None:
    text = "漢é😀a" * 400
    prompt = text.encode()
    ends = range(7, len(prompt) + 1, 7)
    found = align(ends, prompt, [Text(0, text)], text, range(1, len(text) + 1))
    assert found == [len(prompt[:end].decode(errors="ignore")) for end in ends]


def test_token_ids_need_no_tokenizer() -> None:
    prompt = routed_to_path("/v1/completions", prompt=list(range(40)))
    blocks, ends = blocks_at(prompt, NoLanguage(), block_tokens=16)
    assert blocks == BlockHasher("sha256").names(list(range(40)), block_tokens=16)
    assert ends == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (routed_to_path("/v1/embeddings", input="x" * 99), "content"),
        (routed_chat(message("user", [{"type": "image_url", "image_url": {"url": "http://x"}}])), "content"),
        (routed_chat(message("user", [TOOL_RESULT])), "content"),
        (routed_to_path("/v1/completions", prompt="x" * 99, adapter="sql"), "adapter"),
        (routed_to_path("/v1/completions", prompt="x" * (2**20 + 1)), "content"),
        (routed_chat(message("user", "a"), tools=NUMBERS), "content"),
        (routed_chat(message("user", "a"), documents=NUMBERS), "arguments"),
        (routed_chat(message("user", "a"), chat_template_kwargs={"a": NUMBERS}), "arguments"),
    ],
)
def test_prompts_that_cannot_be_mapped_have_a_reason(
    language: FolderLanguage, prompt: RoutedPrompt, reason: str
) -> None:
    with pytest.raises(UnmappedError, match=reason):
        map_prompt(
            prompt, language=language, hasher=BlockHasher("sha256"), block_tokens=16, adapter_path=None
        )


def test_a_text_that_the_template_dropped_does_not_shift_later_texts() -> None:
    texts = (Text(2, "gone"), Text(8, "here it is"))
    assert align([18], b"--gone--here it is", texts, "<u>here it is", range(1, 14)) == [13]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"thinking": True}},
        {"documents": [{"text": "read this first"}]},
        {"chat_template": "{{ messages }}"},
        {"reasoning_effort": "low"},
        {"truncate_prompt_tokens": 8},
        {"add_special_tokens": True},
    ],
)
def test_prompts_that_the_request_renders_in_its_own_way_are_refused(
    language: FolderLanguage, fields: dict[str, Any]
) -> None:
    with pytest.raises(UnmappedError, match="arguments"):
        blocks_at(routed_chat(message("user", "the quick brown fox " * 20), **fields), language)


def test_search_for_texts_ends_after_many_texts_that_the_template_dropped() -> None:
    """Each search goes through the whole prompt. A client with many short messages must not take seconds
    of a core.
    """
    for dropped, found in ((256, True), (257, False)):
        texts = [*(Text(n, "x") for n in range(dropped)), Text(dropped, "here")]
        prompt = b"x" * dropped + b"here" + b"-" * 36
        rendered = "-" * 36 + "here" + "-" * dropped
        (end,) = align([dropped + 4], prompt, texts, rendered, range(1, len(rendered) + 1))
        assert (end == 40) is found


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
    assert read_conversation(prompt)[:2] == (messages, tools)
    texts = read_conversation(prompt)[2]
    assert [text.text for text in texts] == [m["content"] for m in messages]
    whole = prompt.decode(errors="surrogateescape")
    assert all(whole[text.start :].startswith(text.text) for text in texts)


def test_several_text_parts_stay_separate() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages, _, _ = read_conversation(routed_chat(message("user", parts)).inference.prompt)
    assert [m["content"] for m in messages] == [["one", "two"]]


def test_a_conversation_with_a_picture_is_refused() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(UnmappedError):
        read_conversation(routed_chat(message("user", [picture])).inference.prompt)


@pytest.mark.parametrize("prompt", [b"no section at all", b""], ids=["a plain text", "nothing"])
def test_a_prompt_without_sections_is_a_conversation_without_messages(prompt: bytes) -> None:
    assert read_conversation(prompt) == ([], None, [])
