"""A made-up answer of a schema is valid and small, or is refused with the reason."""

import json
import sys
from datetime import datetime
from typing import Any

import pytest

from model_server.text.grammar import small_answer
from model_server.text.language import Alternative, SchemaError

TEXT = {"type": "string"}
LIST = {"$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}}, "$ref": "#/$defs/node"}  # fmt: skip


def made(schema: Any) -> Any:
    pytest.importorskip("llguidance", reason="requirements/dev.txt has it")
    return json.loads(small_answer([Alternative(schema)]))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, {}),
        (TEXT, "word"),
        (
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["b"]},
            {"a": "word", "b": "word"},
        ),
        ({"type": "array", "items": {"enum": ['x"y', "z"]}, "minItems": 2}, ['x"y', 'x"y']),
        ({"const": "<|end|>"}, "<|end|>"),
        ({"type": "integer", "minimum": 7, "maximum": 7}, 7),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        (LIST, {"next": None}),
        ({"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"}, "ABC-0"),
    ],
)
def test_an_answer_is_a_small_one_that_the_schema_allows(schema: Any, expected: object) -> None:
    assert made(schema) == expected


def test_a_text_of_a_format_has_the_format() -> None:
    assert "@" in made({"type": "string", "format": "email"})
    datetime.fromisoformat(made({"type": "string", "format": "date-time"}))  # no ValueError


def test_an_answer_stands_between_its_fixed_texts() -> None:
    pytest.importorskip("llguidance", reason="requirements/dev.txt has it")
    forms = [Alternative({"type": "null"}, '{"name": "a", "parameters": ', "}"), Alternative(TEXT)]
    assert json.loads(small_answer(forms)) == {"name": "a", "parameters": None}


def chained(keyword: str) -> Any:
    schema: Any = TEXT
    for letter in "abcdefghijklmnopqrstuvwx":
        schema = {"type": "string", "pattern": f".*{letter}.*", keyword: [schema]}
    return schema


REFERRED = {f"d{i}": {"pattern": f".*{chr(97 + i)}.*", "$ref": f"#/$defs/d{i + 1}"} for i in range(24)}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"allOf": [{"type": "string", "pattern": f".*{one}.*"} for one in "abcdefghijklmnopqrstuvwx"]},
            "8 p",
        ),
        ({"allOf": [{"properties": {"a": {"pattern": f".*{one}.*"}}} for one in "abcdefghijklm"]}, "8 p"),
        ({"$defs": {**REFERRED, "d24": TEXT}, "$ref": "#/$defs/d0"}, "8 patterns"),
        (chained("anyOf"), "8 patterns"),
        (chained("oneOf"), "8 patterns"),
        ({"anyOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(65)]}, "64 patterns"),
        ({"type": "object", "patternProperties": {f"^{i}a": {} for i in range(65)}}, "64 patterns"),
        ({"type": "string", "pattern": "a" * 513}, "512 characters"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf"),
        ({"type": "integer", "multipleOf": 49_990_000.0}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.002556416}, "multipleOf"),
        ({"type": "integer", "multipleOf": 10**400}, "multipleOf"),
        ({"type": "integer", "multipleOf": True}, "multiple"),
        ({"allOf": [{"multipleOf": 0}, {"type": "integer", "multipleOf": 999_983}]}, "multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": one} for one in (97, 89, 83)]}, "multipleOf"),
        ({"not": TEXT}, "^failed to compile JSON schema: Unimplemented"),
        ({"type": "colour"}, "type"),
        ({"type": "string", "minLength": 5000}, "more than 4096 bytes"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "more than"),
    ],
)
def test_a_schema_of_endless_work_or_without_small_answer_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        made(schema)


def test_many_patterns_that_never_meet_are_no_work() -> None:
    dates = {f"d{i}": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]} for i in range(40)}
    price = {"type": "number", "multipleOf": 0.01}
    described = {"$ref": "#/$defs/price", "description": "what it costs"}
    schema = {"$defs": {"price": price}, "type": "object", "properties": {**dates, "price": described}}
    assert made(schema) == {}


def test_without_llguidance_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SchemaError, match=r"pip install 'prefix-gateway\[structured\]'"):
        small_answer([Alternative(TEXT)])
