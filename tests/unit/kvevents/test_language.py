"""Conversations as in their canonical bytes, rendered and cut into tokens as a server does it, and aligned
with chunks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.kvevents.block_hashes import BlockHasher
from epp.kvevents.conversation import Text, UnmappedError, read_conversation
from epp.kvevents.language import FolderLanguage
from epp.kvevents.mapping import Rendered, aligned_blocks, chunk_ends, map_prompt
from epp.kvevents.routed_prompts import RoutedPrompt
from epp.prefix_index.table import ChunkSchedule
from epp.request.parse import parse_request
from epp.server_caches import hash_chain
from epp.types import EndpointName
from tests.unit.kvevents.a_language import write_language

SCHEDULE = ChunkSchedule(chunk_bytes=32, later_chunk_bytes=32, later_from_bytes=0)


@pytest.fixture
def language(tmp_path: Path) -> FolderLanguage:
    return FolderLanguage(write_language(tmp_path))


def routed(path: str, *, adapter: str = "", **body: Any) -> RoutedPrompt:
    inference = parse_request(path, json.dumps({"model": "m", **body}).encode())
    return RoutedPrompt(
        server=EndpointName("a"),
        process=0,
        model="",
        adapter=adapter,
        inference=inference,
        chain=hash_chain(inference.prompt, seed=1, schedule=SCHEDULE),
        schedule=SCHEDULE,
        at=0.0,
    )


def chat(*messages: dict[str, Any], **more: Any) -> RoutedPrompt:
    return routed("/v1/chat/completions", messages=list(messages), **more)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


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


NUMBERS = [1e-310] * 10_000
"""A decoder takes 4 us a byte for these, and nothing else runs at that time."""
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    "messages",
    [
        [said("user", "hello")],
        [said("system", "ünïcödé"), said("user", "漢字"), said("assistant", ""), said("user", " spaces ")],
        [said("user", "who?", name="bob"), said("assistant", "I", tool_calls=[CALL])],
        [said("tool", "42", tool_call_id="c1")],
        [said("custom", "role")],
    ],
)
def test_messages_come_back_from_the_canonical_prompt(messages: list[dict[str, Any]]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prompt = chat(*messages, tools=tools).inference.prompt
    read = read_conversation(prompt)
    assert list(read.messages) == messages
    assert read.tools == tools
    assert [prompt[t.start : t.end].decode() for t in read.texts] == [m["content"] for m in messages]


def test_several_text_parts_come_back_as_several() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    read = read_conversation(chat(said("user", parts)).inference.prompt)
    assert [m["content"] for m in read.messages] == [["one", "two"]]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "tool_result", "tool_use_id": "x", "content": "42"}],
    ],
)
def test_what_the_canonical_prompt_does_not_keep_is_refused(content: Any) -> None:
    with pytest.raises(UnmappedError):
        read_conversation(chat(said("user", content)).inference.prompt)


def test_a_conversation_is_rendered_as_the_folders_template_says(language: FolderLanguage) -> None:
    rendered = language.render([{"role": "user", "content": " hi "}], tools=None)
    assert rendered == "<s><|user|>hi</s><|assistant|>"
    tool = {"function": {"parameters": {}, "name": "f"}, "type": "function"}
    assert (
        '<|tools|>[{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}]'
        in language.render([{"role": "user", "content": "x"}], tools=[tool])
    )


def test_a_template_that_walks_over_parts_gets_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
    language = FolderLanguage(write_language(tmp_path, template=template))
    assert language.render([{"role": "user", "content": "a"}], tools=None) == "[a]"
    assert language.render([{"role": "user", "content": ["a", "b"]}], tools=None) == "[a][b]"


def test_what_a_template_refuses_is_said(tmp_path: Path) -> None:
    language = FolderLanguage(write_language(tmp_path, template="{{ raise_exception('no system role') }}"))
    with pytest.raises(UnmappedError, match="no system role"):
        language.render([{"role": "user", "content": "a"}], tools=None)


@pytest.mark.parametrize(
    "arguments",
    ["[" * 50_000, '{"a":' * 50_000, "[1", "[" + "1e-310," * 3_000 + "1]", "[" + "[]," * 300_000 + "1]"],
)
def test_arguments_too_deep_or_broken_are_the_clients_fault_and_not_ours(
    language: FolderLanguage, arguments: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(UnmappedError, match=r"template refuses|cannot be read"):
        blocks_at(chat(said("assistant", "", tool_calls=[call])), language)


def test_a_template_that_recurses_without_end_is_refused(tmp_path: Path) -> None:
    template = "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}"
    with pytest.raises(UnmappedError):
        FolderLanguage(write_language(tmp_path, template=template)).render([said("user", "a")], tools=None)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    language = FolderLanguage(
        write_language(tmp_path, template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    )
    with pytest.raises(UnmappedError):
        language.render([{"role": "user", "content": "a"}], tools=None)


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: No such file"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "_config.json: Expecting"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text("[" * 50_000),
            "_config.json: .*recursion",
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text('{"chat_template": 7}'),
            "chat_template is not text",
        ),
        (lambda folder: (folder / "tokenizer_config.json").write_bytes(b"\xff"), "_config.json: .*utf-8"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text(
                "{{" + "(" * 9_000 + "1" + ")" * 9_000 + "}}"
            ),
            "chat template: .*recursion",
        ),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"), "chat template"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_the_file_at_fault(
    tmp_path: Path, break_it: Any, match: str
) -> None:
    folder = write_language(tmp_path)
    break_it(folder)
    with pytest.raises(ConfigError, match=match):
        FolderLanguage(folder)


def test_a_plain_prompt_gets_the_tokenizers_own_tokens_and_a_chat_does_not(language: FolderLanguage) -> None:
    plain = language.tokens("the quick", special=True)
    assert plain.ids[0] == 0
    assert plain.ends[0] == 0
    assert plain.ends[-1] == len("the quick")
    assert list(language.tokens("the quick", special=False).ids) == list(plain.ids[1:])


def test_chunks_of_a_common_beginning_have_the_same_blocks_however_the_prompts_go_on(
    language: FolderLanguage,
) -> None:
    start = said("system", "the quick brown fox jumps over the lazy dog " * 5)
    one, ends_one = blocks_at(chat(start, said("user", "pack my box with five")), language)
    two, ends_two = blocks_at(chat(start, said("user", "漢字 dozen jugs " * 9)), language)
    common = len(chat(start).inference.prompt) // SCHEDULE.chunk_bytes
    assert ends_one[:common] == ends_two[:common]
    assert one[: ends_one[common - 1]] == two[: ends_two[common - 1]]
    assert ends_one[common - 1] > 8


@pytest.mark.parametrize(
    "content", ["plain words here " * 9, "ünïcödé 漢字 " * 9, "  padded  " * 9, "漢" * 90]
)
def test_a_chunk_has_the_blocks_of_the_tokens_that_end_within_it(
    language: FolderLanguage, content: str
) -> None:
    """The test counts them from the rendered text of the beginning of the prompt."""
    prompt = chat(said("user", content))
    _, ends = blocks_at(prompt, language)
    rendered = language.render([said("user", content)], tools=None)
    tokens = language.tokens(rendered, special=False)
    stripped = content.strip()
    shift = len(content) - len(content.lstrip())
    for end, found in zip(chunk_ends(SCHEDULE, len(ends)), ends, strict=True):
        inside = len(prompt.inference.prompt[:end].partition(b"\xfe")[2].decode(errors="ignore"))
        chars = rendered.index(stripped) + min(max(inside - shift, 0), len(stripped))
        whole = sum(e <= chars for e in tokens.ends) // 4
        assert abs(found - whole) <= 1
        assert found <= len(tokens.ids) // 4


def test_letters_of_several_bytes_are_counted_once_however_many_chunks_end_in_a_text() -> None:
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
            Rendered(text, range(1, len(text) + 1), (Text(0, text, size),), size, len(text)),
            block_tokens=1,
            blocks=10**6,
        )
    finally:
        sys.setprofile(None)
    whole = [len(text.encode()[:end].decode(errors="ignore")) for end in range(7, 2_000, 7)]
    assert ends[: len(whole)] == whole
    assert len(encoded) == 1


def test_a_text_of_too_many_tokens_is_not_followed(language: FolderLanguage) -> None:
    """The tokenizers package frees its result in one step: 60 ms for a million tokens."""
    for letter in ("j", "\u6f22"):
        with pytest.raises(UnmappedError, match="262144 tokens"):
            language.tokens(letter * (2**18 + 9), special=False)
    words = "the quick brown fox jumps over the lazy dog " * 3000
    for text in ("j" * 2**18, words + "\u6f22" * 20_000, "\u6f22" * 2**14):
        tokens = language.tokens(text, special=False)
        assert len(tokens.ids) <= 2**18
        assert tokens.ends[-1] == len(text)


def test_token_ids_need_no_tokenizer() -> None:
    prompt = routed("/v1/completions", prompt=list(range(40)))
    mapped = map_prompt(
        prompt, language=None, hasher=BlockHasher("sha256"), block_tokens=16, adapter_path=None
    )
    assert mapped.blocks == BlockHasher("sha256").names(list(range(40)), block_tokens=16)
    assert mapped.ends_blocks == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (routed("/v1/embeddings", input="x" * 99), "content"),
        (chat(said("user", [{"type": "image_url", "image_url": {"url": "http://x"}}])), "content"),
        (routed("/v1/completions", prompt="x" * 99, adapter="sql"), "adapter"),
        (routed("/v1/completions", prompt="x" * (2**20 + 1)), "content"),
        (chat(said("user", "a"), tools=NUMBERS), "content"),
        (chat(said("user", "a"), documents=NUMBERS), "arguments"),
        (chat(said("user", "a"), chat_template_kwargs={"a": NUMBERS}), "arguments"),
    ],
)
def test_prompts_that_cannot_be_mapped_say_why(
    language: FolderLanguage, prompt: RoutedPrompt, reason: str
) -> None:
    with pytest.raises(UnmappedError) as caught:
        map_prompt(
            prompt, language=language, hasher=BlockHasher("sha256"), block_tokens=16, adapter_path=None
        )
    assert caught.value.reason == reason


def test_a_text_that_the_template_dropped_does_not_shift_what_follows() -> None:
    texts = (Text(2, "gone", 6), Text(8, "here it is", 18))
    ends = aligned_blocks(
        [18], Rendered("<u>here it is", range(1, 14), texts, 18, 13), block_tokens=1, blocks=99
    )
    assert ends == [13]


THINKS_FIRST = "{% if thinking %}think hard {% endif %}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
TALK = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
THINKS_LAST = "{% if enable_thinking is false %}no thoughts{% endif %}{{ effort or '' }}"


def test_template_arguments_of_the_request_reach_the_template(tmp_path: Path) -> None:
    language = FolderLanguage(
        write_language(tmp_path, template=TALK + THINKS_LAST), arguments={"effort": "some", "messages": []}
    )
    said_so = [said("user", "hi")]
    assert language.render(said_so, tools=None) == "<|user|>hi</s>some"
    assert language.render(said_so, tools=None, arguments={"effort": "much"}) == "<|user|>hi</s>much"
    assert language.render(said_so, tools=None, arguments={"effort": None}) == "<|user|>hi</s>some"
    assert language.render(said_so, tools=None, arguments={"enable_thinking": False}).endswith(
        "no thoughtssome"
    )


def test_arguments_that_change_the_end_leave_the_chunks_with_their_blocks(tmp_path: Path) -> None:
    language = FolderLanguage(write_language(tmp_path, template=TALK + THINKS_LAST))
    text = said("user", "the quick brown fox " * 20)
    plain, plain_ends = blocks_at(chat(text), language)
    blocks, ends = blocks_at(chat(text, chat_template_kwargs={"enable_thinking": False}), language)
    assert ends == plain_ends
    assert blocks[: ends[-1]] == plain[: ends[-1]]
    assert len(blocks) > len(plain)
    assert blocks_at(chat(text, reasoning_effort="none"), language) == (blocks, ends)
    assert blocks_at(chat(text, chat_template_kwargs={"unknown": 1}), language) == (plain, plain_ends)


def test_only_the_chunks_before_what_arguments_change_are_mapped(tmp_path: Path) -> None:
    hint = "{% if thinking and loop.last %}think hard {% endif %}"
    template = TALK.replace("<|{{", hint + "<|{{")
    language = FolderLanguage(write_language(tmp_path, template=template))
    talk = chat(said("user", "the quick brown fox " * 10), said("user", "jumps over " * 20))
    told = chat(*read_conversation(talk.inference.prompt).messages, chat_template_kwargs={"thinking": True})
    plain, plain_ends = blocks_at(talk, language)
    blocks, ends = blocks_at(told, language)
    assert 0 < len(ends) < len(plain_ends)
    assert list(ends) == list(plain_ends[: len(ends)])
    assert blocks[: ends[-1]] == plain[: ends[-1]]
    assert blocks[-1] not in plain


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"thinking": True}},
        {"documents": [{"text": "read this first"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": 7},
        {"truncate_prompt_tokens": 8},
    ],
)
def test_arguments_that_change_the_beginning_are_refused_with_their_reason(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    language = FolderLanguage(write_language(tmp_path, template=THINKS_FIRST + TALK))
    with pytest.raises(UnmappedError) as caught:
        blocks_at(chat(said("user", "the quick brown fox " * 20), **fields), language)
    assert caught.value.reason == "arguments"


def test_special_tokens_are_added_as_the_request_says(language: FolderLanguage) -> None:
    def ids(prompt: RoutedPrompt) -> int:
        return len(blocks_at(prompt, language, block_tokens=1)[0])

    text = "the quick brown fox " * 5
    plain = ids(routed("/v1/completions", prompt=text))
    assert ids(routed("/v1/completions", prompt=text, add_special_tokens=False)) == plain - 1
    talk = ids(chat(said("user", text)))
    assert ids(chat(said("user", text), add_special_tokens=True)) == talk + 1


def test_after_many_texts_that_the_template_dropped_the_others_are_not_looked_for() -> None:
    """Each search goes through the whole prompt. A client with many short messages must not take seconds
    of a core.
    """
    for dropped, found in ((256, True), (257, False)):
        texts = [Text(n, "x", n + 1) for n in range(dropped)]
        size = dropped + 40
        texts.append(Text(dropped, "here", dropped + 4))
        (end,) = aligned_blocks(
            [dropped + 4],
            Rendered("-" * 36 + "here" + "-" * (size - 40), range(1, size + 1), texts, size, size),
            block_tokens=1,
            blocks=size,
        )
        assert (end == 40) is found
