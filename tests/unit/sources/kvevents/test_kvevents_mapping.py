"""Prompts are mapped to the names of their blocks, and ends of blocks are aligned with ends of chunks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest

from epp.sources.kvevents.block_hashes import BlockHasher
from epp.sources.kvevents.language import FolderLanguage
from epp.sources.kvevents.mapping import Rendered, Text, UnmappedError, aligned_blocks, chunk_ends, map_prompt
from epp.sources.kvevents.routed_prompts import RoutedPrompt
from tests.unit.sources.kvevents.routed import (
    SCHEDULE,
    message,
    routed_chat,
    routed_to_path,
)

NUMBERS = [1e-310] * 10_000
"""A decoder takes 4 us a byte for these, and nothing else runs at that time."""
THINKS_FIRST = "{% if thinking %}think hard {% endif %}{% for d in documents or [] %}{{ d.text }}{% endfor %}"


def blocks_at(
    prompt: RoutedPrompt, language: FolderLanguage, *, block_tokens: int = 4
) -> tuple[Sequence[int], Sequence[int]]:
    mapped = map_prompt(
        prompt,
        language=language,
        hasher=BlockHasher("sha256"),
        block_tokens=block_tokens,
        adapter_path=None,
    )
    return mapped.blocks, mapped.ends_blocks


def test_chunks_of_a_common_beginning_have_the_same_blocks(
    language: FolderLanguage,
) -> None:
    start = message("system", "the quick brown fox jumps over the lazy dog " * 5)
    one, ends_one = blocks_at(routed_chat(start, message("user", "pack my box with five")), language)
    two, ends_two = blocks_at(routed_chat(start, message("user", "漢字 dozen jugs " * 9)), language)
    common = len(routed_chat(start).inference.prompt) // SCHEDULE.chunk_bytes
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
    for end, found in zip(chunk_ends(SCHEDULE, len(ends)), ends, strict=True):
        inside = len(prompt.inference.prompt[:end].partition(b"\xfe")[2].decode(errors="ignore"))
        chars = rendered.index(stripped) + min(max(inside - shift, 0), len(stripped))
        whole = sum(e <= chars for e in tokens.ends) // 4
        assert abs(found - whole) <= 1
        assert found <= len(tokens.ids) // 4


def test_letters_of_several_bytes_are_counted_once_for_all_chunks() -> None:
    """Before, each end of a chunk looked at the whole text: 8 MB would have taken half a minute."""
    text = "漢é😀a" * 4_000
    size = len(text.encode())
    encoded: list[str] = []

    def note(_: FrameType, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") == "encode":
            encoded.append(event)

    sys.setprofile(note)
    try:
        ends = aligned_blocks(
            range(7, size, 7),
            Rendered(text, range(1, len(text) + 1), (Text(0, text, size),), size),
            block_tokens=1,
            blocks=10**6,
        )
    finally:
        sys.setprofile(None)
    whole = [len(text.encode()[:end].decode(errors="ignore")) for end in range(7, 2_000, 7)]
    assert ends[: len(whole)] == whole
    assert len(encoded) == 1


def test_token_ids_need_no_tokenizer() -> None:
    prompt = routed_to_path("/v1/completions", prompt=list(range(40)))
    mapped = map_prompt(
        prompt, language=None, hasher=BlockHasher("sha256"), block_tokens=16, adapter_path=None
    )
    assert mapped.blocks == BlockHasher("sha256").names(list(range(40)), block_tokens=16)
    assert mapped.ends_blocks == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (routed_to_path("/v1/embeddings", input="x" * 99), "content"),
        (routed_chat(message("user", [{"type": "image_url", "image_url": {"url": "http://x"}}])), "content"),
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
    with pytest.raises(UnmappedError) as caught:
        map_prompt(
            prompt, language=language, hasher=BlockHasher("sha256"), block_tokens=16, adapter_path=None
        )
    assert caught.value.reason == reason


def test_a_text_that_the_template_dropped_does_not_shift_later_texts() -> None:
    texts = (Text(2, "gone", 6), Text(8, "here it is", 18))
    ends = aligned_blocks([18], Rendered("<u>here it is", range(1, 14), texts, 18), block_tokens=1, blocks=99)
    assert ends == [13]


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
    with pytest.raises(UnmappedError) as caught:
        blocks_at(routed_chat(message("user", "the quick brown fox " * 20), **fields), language)
    assert caught.value.reason == "arguments"


def test_search_for_texts_ends_after_many_texts_that_the_template_dropped() -> None:
    """Each search goes through the whole prompt. A client with many short messages must not take seconds
    of a core.
    """
    for dropped, found in ((256, True), (257, False)):
        texts = [Text(n, "x", n + 1) for n in range(dropped)]
        size = dropped + 40
        texts.append(Text(dropped, "here", dropped + 4))
        (end,) = aligned_blocks(
            [dropped + 4],
            Rendered("-" * 36 + "here" + "-" * (size - 40), range(1, size + 1), texts, size),
            block_tokens=1,
            blocks=size,
        )
        assert (end == 40) is found
