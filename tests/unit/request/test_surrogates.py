"""Escapes of lone surrogates in JSON are replaced, and all other bytes stay."""

from __future__ import annotations

import json

import pytest

from epp.request.surrogates import replace_lone

LONE = rb"\ufffd"


@pytest.mark.parametrize(
    ("escaped", "replaced"),
    [
        (rb"\ud800", LONE),
        (rb"\uDFFF", LONE),
        (rb"\ud800\ud83d\ude00", LONE + rb"\ud83d\ude00"),
        (rb"\ud83d\ude00\ude00", rb"\ud83d\ude00" + LONE),
        (rb"\ude00\ud83d", LONE + LONE),
        (rb"\ud83d \ude00", LONE + b" " + LONE),
        (rb"\ud83d\u0041", LONE + rb"\u0041"),
        (rb"\\\ud800", rb"\\" + LONE),
    ],
)
def test_only_a_surrogate_without_its_other_half_is_replaced(escaped: bytes, replaced: bytes) -> None:
    assert replace_lone(b'{"a":"x' + escaped + b'y"}') == b'{"a":"x' + replaced + b'y"}'


@pytest.mark.parametrize(
    "text", [b"", b"plain", rb"\ud83d\ude00", rb"\\ud800", rb"\\\\ud800", rb"\ud7ff\ue000", rb"\ud80"]
)
def test_json_without_a_lone_surrogate_is_the_same_object(text: bytes) -> None:
    body = b'{"a":"' + text + b'"}'
    assert replace_lone(body) is body


def test_the_result_can_be_read_as_text_and_written_as_utf_8() -> None:
    body = rb'{"\ud800k":["\udc00","a\ud83d\ude00b"]}'
    assert json.loads(replace_lone(body)) == {"\ufffdk": ["\ufffd", "a\U0001f600b"]}
    json.loads(replace_lone(body))["\ufffdk"][0].encode()


def test_json_with_more_than_1000_surrogates_is_not_changed() -> None:
    few, many = b'"' + rb"\ud800" * 1000 + b'"', b'"' + rb"\ud800" * 1001 + b'"'
    assert replace_lone(few) == b'"' + LONE * 1000 + b'"'
    assert replace_lone(many) is many
