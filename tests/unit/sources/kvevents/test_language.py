"""A model's folder as a server uses it: its template renders conversations, and its tokenizer cuts texts."""

from pathlib import Path
from typing import Any

import pytest

from epp.base.errors import ConfigError
from epp.sources.kvevents.decoding import BlockHasher
from epp.sources.kvevents.language import FolderLanguage
from epp.sources.kvevents.mapping import UnmappedError, map_prompt
from tests.unit.sources.kvevents.a_language import write_language
from tests.unit.sources.kvevents.routed import TALK, THINKS_LAST, message, routed_chat


def test_a_conversation_is_rendered_as_the_folders_template_says(language: FolderLanguage) -> None:
    rendered = language.render([{"role": "user", "content": " hi "}], tools=None)
    assert rendered == "<s><|user|>hi</s><|assistant|>"
    tool = {"function": {"parameters": {}, "name": "f"}, "type": "function"}
    assert (
        '<|tools|>[{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}]'
        in language.render([{"role": "user", "content": "x"}], tools=[tool])
    )


def test_a_template_that_iterates_over_parts_gets_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
    language = FolderLanguage(write_language(tmp_path, template=template))
    assert language.render([{"role": "user", "content": "a"}], tools=None) == "[a]"
    assert language.render([{"role": "user", "content": ["a", "b"]}], tools=None) == "[a][b]"


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    language = FolderLanguage(write_language(tmp_path, template="{{ raise_exception('no system role') }}"))
    with pytest.raises(UnmappedError, match="template") as refused:
        language.render([{"role": "user", "content": "a"}], tools=None)
    assert str(refused.value.__cause__) == "no system role"


@pytest.mark.parametrize(
    "arguments",
    ["[" * 50_000, '{"a":' * 50_000, "[1", "[" + "1e-310," * 3_000 + "1]", "[" + "[]," * 300_000 + "1]"],
)
def test_nested_or_broken_arguments_count_as_prompt_that_cannot_be_mapped(
    language: FolderLanguage, arguments: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(UnmappedError, match=r"template|content"):
        map_prompt(
            routed_chat(message("assistant", "", tool_calls=[call])),
            language=language,
            hasher=BlockHasher("sha256"),
            block_tokens=4,
            adapter_path=None,
        )


def test_a_template_that_recurses_without_end_is_refused(tmp_path: Path) -> None:
    template = "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}"
    with pytest.raises(UnmappedError):
        FolderLanguage(write_language(tmp_path, template=template)).render([message("user", "a")], tools=None)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
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
def test_the_error_for_an_unusable_folder_names_the_file_at_fault(
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


def test_a_text_of_too_many_tokens_is_not_followed(language: FolderLanguage) -> None:
    """The tokenizers package frees its result in one step: 60 ms for a million tokens."""
    for letter in ("j", "\u6f22"):
        with pytest.raises(UnmappedError, match="content"):
            language.tokens(letter * (2**18 + 9), special=False)
    words = "the quick brown fox jumps over the lazy dog " * 3000
    for text in ("j" * 2**18, words + "\u6f22" * 20_000, "\u6f22" * 2**14):
        tokens = language.tokens(text, special=False)
        assert len(tokens.ids) <= 2**18
        assert tokens.ends[-1] == len(text)


def test_template_arguments_of_the_servers_reach_the_template(tmp_path: Path) -> None:
    language = FolderLanguage(
        write_language(tmp_path, template=TALK + THINKS_LAST), arguments={"effort": "some", "messages": []}
    )
    turns = [message("user", "hi")]
    assert language.render(turns, tools=None) == "<|user|>hi</s>some"
